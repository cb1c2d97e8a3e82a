"""Online methods: generate completions for prompts, rank them, and build a pair from the best and the worst."""
