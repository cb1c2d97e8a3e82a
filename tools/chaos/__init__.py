"""Runs that are killed again and again: whether each restart continues as if nothing had happened.

:mod:`.plan` draws which process dies where, :mod:`.rank` is the run under test with a kill inside, :mod:`.attempt`
starts it and kills from outside, :mod:`.judge` looks at what is on disk, :mod:`.record` remembers every attempt.
"""
