"""Run TRL's own tests and example scripts against this package, with models and datasets from a local Hub."""
