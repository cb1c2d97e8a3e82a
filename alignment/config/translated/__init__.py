"""Translation of other programs' settings to options: sections of the DeepSpeed JSON, and Accelerate's environment."""
