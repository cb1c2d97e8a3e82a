"""The comparison of every type of causal language model with its own logits: ``python -m tools.architectures``."""
