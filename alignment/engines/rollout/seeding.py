"""Randomness of a rollout: its own while it lasts, and everyone else's untouched."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy
import torch
from transformers import set_seed


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within this context Python, NumPy and torch, on every device, are seeded; their states come back on any exit."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    python, array = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            set_seed(seed % 2**32)  # NumPy's limit
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)
