"""Kill runs repeatedly and check that each restart continues as if nothing had happened.

:mod:`.plan` chooses which rank dies and where, :mod:`.rank` is the run under test, which kills itself, :mod:`.run`
starts it again and again, :mod:`.judge` checks the files on disk.
"""
