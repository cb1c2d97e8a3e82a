"""TRL's own tests, run against this package: how much of a script written for TRL runs here.

``python -m tools.trl CHECKOUT...`` takes checkouts of TRL as they are. Their test files are copied into a temporary
folder and run with nothing but the import changed: a package ``trl`` exists while they run, whose names are the public
ones of ``alignment`` (:mod:`tools.trl.shim`). Models and data sets come from a local hub (:mod:`tools.trl.hub`).
``expected.txt`` names every test that does not pass, with a reason from a closed list (:mod:`tools.trl.reasons`).
"""
