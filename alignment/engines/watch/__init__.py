"""Watching a process and its peers: what it is doing, who asks it to stop, which rank is silent or hangs."""
