"""Compare the log-probs of every type of causal language model with its logits: ``python -m tools.architectures``."""
