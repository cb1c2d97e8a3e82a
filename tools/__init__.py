"""Instruments of development: what runs, measures and compares the project, and is no part of it."""
