"""The documentation's site and its generated pages: extensions of Sphinx, and `python -m tools.documentation`."""
