"""`make demo`: a small world, a model that learns to speak in it, KTO and CPO from there, and a checked table."""
