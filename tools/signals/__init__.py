"""Signals to launchers and workers of real runs: does each end whole, in time, as expected, and go on bitwise?

:mod:`.plan` reads the cells and what is expected of each from ``expected.txt``, :mod:`.command` starts a launcher and
sends the signal, :mod:`.worker` is the program under test with its steps slowed down, :mod:`.run` makes a cell and
resumes from what it left, :mod:`.judge` compares with what was expected, :mod:`.record` remembers every cell.
"""
