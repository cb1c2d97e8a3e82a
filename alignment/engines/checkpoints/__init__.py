"""Checkpoints of a run, and the output folder that they are in."""
