"""Rollouts by vLLM, in a server of its own."""
