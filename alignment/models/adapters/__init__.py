"""Adapters (PEFT): planned before weights are loaded, put into models, read from folders, merged into their base."""
