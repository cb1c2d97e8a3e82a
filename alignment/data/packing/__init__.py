"""Packing: combine several rows into one sequence, and read the packs as rows."""
