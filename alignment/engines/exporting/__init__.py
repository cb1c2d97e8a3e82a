"""Export: an adapter or a full model of a run as a Hugging Face folder to publish, compared with what it came from."""
