"""From a checkpoint to an ``nn.Module`` that yields per-token log-probs: loading, the log-prob head, the scorer."""
