"""The parts of ``tools/same_numbers.py``: its runs, and the comparison of two runs."""
