"""What scripts ask transformers' arguments about the process that they run in."""
