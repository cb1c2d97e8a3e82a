"""Rollouts by a vLLM server: a process of its own, with an environment of its own."""
