"""One training loop, one evaluation, and a short file per method."""
