"""Measurements that anyone can repeat: `side_by_side.py` against TRL, `gpu_smoke.sh` on one GPU. Not installed."""
