"""The commands: their dispatch (``commands``), arguments, help and output, and what each of them does."""
