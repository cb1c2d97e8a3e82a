"""Run TRL's own tests against this package, to measure how much of a script written for TRL works with it.

``python -m tools.trl CHECKOUT...`` takes unmodified checkouts of TRL. Their test files are copied to a temporary
folder and run with a substitute package ``trl`` that provides the public names of ``alignment``
(:mod:`tools.trl.shim`). Models and datasets come from a local Hub (:mod:`tools.trl.hub`). ``expected.txt`` lists every
test that does not pass, with a reason from a fixed list (:mod:`tools.trl.reasons`).
"""
