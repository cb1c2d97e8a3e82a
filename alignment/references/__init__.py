"""Log-probs of the reference model, wherever they come from."""
