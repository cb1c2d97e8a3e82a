"""Example uses of the package: a method defined in one file, and the demo. Not installed."""
