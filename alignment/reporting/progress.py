"""The progress bar of a run: loss, margin, KL or accuracy, tokens per second, memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from tqdm.auto import tqdm

Item = TypeVar("Item")
_SHOWN = {"loss": "loss", "rewards/margins": "margin", "kl": "kl", "rewards/accuracies": "acc"}


def memory_gib(device: torch.device) -> float:
    """Memory in GiB: reserved now by the device's allocator or, on a CPU, the process's peak resident set size."""
    return (torch.cuda.memory_reserved(device) if device.type == "cuda" else peak_resident_bytes()) / 2**30


def peak_resident_bytes() -> int:
    """The largest resident set size of this process since its start."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Progress:
    """A progress bar over optimizer steps or evaluation batches, starting at ``done``; silent unless ``enabled``."""

    def __init__(self, total: int, description: str, enabled: bool, device: torch.device, done: int = 0) -> None:
        self._bar = tqdm(total=total, initial=done, desc=description, disable=not enabled, dynamic_ncols=True)
        self._device, self._tokens, self._start = device, 0, time.monotonic()

    def advance(self, metrics: Mapping[str, float] | None = None, tokens: int = 0) -> None:
        """Advance by one step, with its metrics and its number of tokens."""
        self._tokens += tokens
        if metrics is not None and not self._bar.disable:
            shown = {label: f"{metrics[name]:.4g}" for name, label in _SHOWN.items() if name in metrics}
            rate = self._tokens / max(time.monotonic() - self._start, 1e-9)
            shown |= {"tok/s": f"{rate:.0f}", "mem": f"{memory_gib(self._device):.1f}G"}
            self._bar.set_postfix(shown, refresh=False)
        self._bar.update()

    def watch(self, items: Sequence[Item], passes: int = 1) -> Sequence[Item]:
        """Wrap ``items`` so that each access advances the bar; expects ``passes`` passes over them."""
        self._bar.reset(total=len(items) * passes)
        return Watched(items, self.advance)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        if not self._bar.disable:
            self._bar.write(text)

    def close(self) -> None:
        """Close the bar, leaving it displayed."""
        self._bar.close()


class Watched(Sequence[Item]):
    """A sequence that calls ``taken`` at each access."""

    def __init__(self, items: Sequence[Item], taken: Callable[[], None]) -> None:
        self._items, self._taken = items, taken

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:  # type: ignore[override]
        item = self._items[index]
        self._taken()
        return item
