"""Metric accumulators, the progress bar and the run's log."""
