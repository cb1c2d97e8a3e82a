"""Reproducible measurements: `side_by_side.py` compares with TRL, `gpu_smoke.sh` tests one GPU. Not installed."""
