"""PEFT adapters: plan them before weights are loaded, inject them, read them from folders, merge them."""
