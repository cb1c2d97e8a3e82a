"""Callers of the package, as a user writes them: a method of one file, and the demo. Not installed."""
