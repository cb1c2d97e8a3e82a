"""Send signals to launchers and workers of real runs, and check that they exit in time and resume bitwise.

:mod:`.plan` reads the cells and their expected results from ``expected.txt``, :mod:`.command` starts a launcher and
sends the signal, :mod:`.worker` is the program under test with slow steps, :mod:`.run` makes a cell and judges it.
"""
