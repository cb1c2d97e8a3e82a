"""What policy and reference answer to prompts of an evaluation set, while a run lasts and without a trace in it."""
