"""Run TRL's own tests and example scripts against this package, to measure how much of TRL's code works with it.

Checkouts of TRL are not modified. Models and datasets come from a local Hub (:mod:`tools.trl.hub`). Tests import a
substitute package ``trl`` that provides the public names of ``alignment`` (:mod:`tools.trl.shim`); ``expected.txt``
lists those that fail, with the reason. Of scripts, only the import lines are changed (:mod:`tools.trl.scripts`).
"""
