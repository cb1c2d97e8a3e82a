"""Checkpoints that a run continues from: what they hold, how they are written, and how they are read."""
