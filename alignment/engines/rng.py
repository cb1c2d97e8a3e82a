"""The process's random number generators: saving, restoring, and isolating code that draws from them."""

from __future__ import annotations

import base64
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import set_seed

from alignment.engines.collectives import device

Result = TypeVar("Result")


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and torch (on all devices) within this context; restore their states on any exit."""
    with preserved():
        seed_streams(seed)
        yield


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restore the states of Python, NumPy and torch on any exit from this context."""
    rewind = rewinder()
    try:
        yield
    finally:
        rewind()


def as_before(call: Callable[[], Result]) -> Callable[[], Result]:
    """Wrap ``call`` so that every call starts from the present random states."""
    rewind = rewinder()

    def repeated() -> Result:
        rewind()
        return call()

    return repeated


def rewinder() -> Callable[[], None]:
    """Return a function that resets the random states to the present ones, any number of times."""
    python, array, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def rewind() -> None:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(host)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)

    return rewind


def seed_streams(seed: int) -> None:
    """Seed Python, NumPy and torch on all devices, with at most 32 bits, as NumPy requires."""
    set_seed(seed % 2**32)


class RandomStreams:
    """The process-wide random number generators of Python, NumPy and torch, on the CPU and on this rank's device."""

    def state_dict(self) -> dict[str, Any]:
        """The states of the generators."""
        version, internal, gauss = random.getstate()
        numpy = np.random.get_state(legacy=False)
        assert isinstance(numpy, dict)
        inner = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in numpy["state"].items()}
        own = device()
        return {
            "python": [version, list(internal), gauss],
            "numpy": {**numpy, "state": inner},
            "torch": _text(torch.get_rng_state()),
            "cuda": _text(torch.cuda.get_rng_state(own)) if own.type == "cuda" else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        inner = {**state["numpy"]["state"], "key": np.array(state["numpy"]["state"]["key"], dtype=np.uint32)}
        np.random.set_state({**state["numpy"], "state": inner})
        torch.set_rng_state(_tensor(state["torch"]))
        if state["cuda"] is not None and device().type == "cuda":
            torch.cuda.set_rng_state(_tensor(state["cuda"]), device())


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
