"""Checks before ranks join the process group: can they meet, at which addresses, and a clear error if not."""
