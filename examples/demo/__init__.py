"""`make demo`: a small world, a model that learns to speak in it, KTO, CPO and Online DPO, and a checked table."""
