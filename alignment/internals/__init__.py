"""Private APIs of other libraries: every touch of one is a function here, in a module named after the library.

A library is imported when a function is called, so importing these modules is free. Each docstring says why the touch
is needed and with which version it was seen; ``tests/engine/test_internals_*.py`` tests what it relies on.
"""
