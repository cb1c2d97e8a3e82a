"""DeepSpeed engines and processes: launch environment, process guard, engines, checkpoints.

Importing this package imports neither torch nor DeepSpeed; its modules import them when they are used.
"""
