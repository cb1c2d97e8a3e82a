"""Memory of devices: what is free, what is still to come, and how torch allocates it."""
