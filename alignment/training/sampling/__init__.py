"""Completions of policy and reference for evaluation prompts, sampled without affecting training."""
