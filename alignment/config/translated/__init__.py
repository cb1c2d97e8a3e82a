"""What other programs' settings mean in our options: DeepSpeed's own sections, and accelerate's environment."""
