"""Online methods: prompts become completions, these are ranked, and the best and the worst make a pair."""
