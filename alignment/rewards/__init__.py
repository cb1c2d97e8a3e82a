"""Rewards: user-defined reward functions and judges, reward models, and their weighted sum."""
