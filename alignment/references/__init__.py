"""Log-probs of the reference model, for every placement."""
