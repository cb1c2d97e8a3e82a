"""Completions from the policy inside its engine: requests, batch sizes that fit, and backends."""
