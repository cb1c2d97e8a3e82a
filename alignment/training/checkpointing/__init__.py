"""The output folder of a run: its checkpoints, the best one, and resuming."""
