"""The pictures of the documentation, drawn from recorded data.

``python -m tools.pictures`` draws every picture below ``docs/pictures/`` in a light and a dark version.
``python -m tools.pictures --record outputs/demo`` first records the runs of ``make demo``.
The recorded data is in ``docs/pictures/data/``: ``demo.json``, written by ``--record``, and ``beside_trl.json``, the
results of ``benchmarks/side_by_side.py``.
"""
