"""TRL's example scripts, run with this package in the place of TRL."""
