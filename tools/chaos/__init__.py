"""Kill runs repeatedly and check that each restart continues as if nothing had happened.

:mod:`.plan` chooses which process dies and where, :mod:`.rank` is the run under test, which can kill itself,
:mod:`.attempt` starts it and kills it from outside, :mod:`.judge` checks the files on disk, :mod:`.record` stores the
result of every attempt.
"""
