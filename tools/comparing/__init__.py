"""The parts of ``tools/same_numbers.py``: which runs it makes, and how two runs are compared."""
