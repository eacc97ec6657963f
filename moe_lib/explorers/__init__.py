"""Explorers, one file a notebook: a pure draw function from values to HTML, and its controls."""
