"""Export of a run's adapter or full model as a Hugging Face folder, compared with its source."""
