"""Turn a checkpoint into an ``nn.Module`` that returns per-token log-probs: loading, the log-prob head, the scorer."""
