"""Private APIs of other libraries: every use of one is a function here, usually in a module named after the library.

A library is imported when a function is called, so importing these modules is cheap. Each docstring explains why the
private API is needed and with which version it was seen; ``tests/engine/test_internals_*.py`` tests the assumptions.
"""
