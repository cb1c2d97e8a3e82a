"""Code blocks of the documentation: extracted, checked, and run as a reader would run them.

The conventions are in CONTRIBUTING.md, "Code in the documentation".
"""
