"""Code blocks of the documentation: extracted, checked, and run as a reader would run them.

See "Code in the documentation" in CONTRIBUTING.md for the conventions.
"""
