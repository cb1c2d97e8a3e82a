"""Checkpoints on disk: folders that appear whole or not at all, what is in them, and who may write them."""
