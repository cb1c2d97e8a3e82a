"""Checkpoints on disk: folders that are published atomically, their content, and who may write them."""
