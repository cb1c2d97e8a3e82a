"""What scripts that were written for TRL touch of a trainer, beside training and evaluating with it."""
