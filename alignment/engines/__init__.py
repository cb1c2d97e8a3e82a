"""DeepSpeed engines, their optimizers and phases. Importing this package imports neither torch nor DeepSpeed."""
