"""The output folder of a run: its checkpoints, which is the best, and how a run goes on from one."""
