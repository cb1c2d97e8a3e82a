"""Options, their checks, and the DeepSpeed JSON built from them; importable without torch and transformers."""
