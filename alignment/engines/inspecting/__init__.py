"""Looking at a run from outside, by its files alone. Importing this package imports neither torch nor DeepSpeed."""
