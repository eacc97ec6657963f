"""For every pytest run from a checkout, a bare `pytest --nbval` included."""

from pathlib import Path


def pytest_configure(config):
    # Notebook outputs are compared to the letter, but for the pixels of a picture: its words, the alt text, are compared.
    if hasattr(config.option, "nbval_sanitize_with") and not config.option.nbval_sanitize_with:
        config.option.nbval_sanitize_with = str(Path(__file__).with_name("tools") / "nbval.cfg")
