"""Device memory: what is free, what will still be allocated, and how torch allocates it."""
