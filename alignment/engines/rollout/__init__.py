"""Completions from the policy inside its engine: what is asked for, how much fits at once, and who generates it."""
