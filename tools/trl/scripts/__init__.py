"""Run TRL's example scripts with this package instead of TRL."""
