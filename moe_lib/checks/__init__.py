"""Checkers of the exercises, one file a notebook."""
