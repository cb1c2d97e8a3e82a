"""Inspection of a run through its files alone. Importing this package imports neither torch nor DeepSpeed."""
