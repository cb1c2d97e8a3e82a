"""The progress of a run, as a bar on a terminal and as lines in a log: loss, margin, tokens per second, memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from tqdm.auto import tqdm

from alignment.reporting.formats import duration
from alignment.run.ranks import rank, tell

Item = TypeVar("Item")
_SHOWN = {
    "loss": "loss", "rewards/margins": "margin", "objective/scores": "score", "kl": "kl",
    "rewards/accuracies": "acc", "win_rate": "win rate",
}  # fmt: skip


def draws_bars(disable_tqdm: bool) -> bool:
    """Whether progress is shown as bars: on a terminal or in a notebook, unless ``disable_tqdm`` is set."""
    return not disable_tqdm and ("ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty()))


def say(text: str) -> None:
    """Print a line on the first rank, above the progress bars, if any."""
    with tqdm.external_write_mode():
        tell(text)


def evaluation_line(step: int, total: int, name: str, metrics: Mapping[str, float]) -> str:
    """The result of an evaluation, whose metrics begin with ``name``, in one line; ``total`` is 0 without training."""
    parts = [*map(" ".join, _shown(metrics, f"{name}_").items()), duration(metrics[f"{name}_runtime"])]
    return (f"step {_of(step, total)}, " if total else "") + f"{name}: {', '.join(parts)}"


def _shown(metrics: Mapping[str, float], prefix: str = "") -> dict[str, str]:
    """The most important metrics by their labels."""
    return {label: f"{metrics[prefix + name]:.4g}" for name, label in _SHOWN.items() if prefix + name in metrics}


def _of(step: int, total: int) -> str:
    return f"{step:{len(str(total))}}/{total}"


def memory_gib(device: torch.device) -> float:
    """Memory in GiB: reserved now by the device's allocator or, on a CPU, the process's peak resident set size."""
    return (torch.cuda.memory_reserved(device) if device.type == "cuda" else peak_resident_bytes()) / 2**30


def peak_resident_bytes() -> int:
    """The largest resident set size of this process since its start."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Progress:
    """Progress of optimizer steps or evaluation batches from ``done`` on: a bar on the first rank if it ``draws``."""

    def __init__(self, total: int, description: str, disable_tqdm: bool, device: torch.device, done: int = 0) -> None:
        self.draws = draws_bars(disable_tqdm)
        hidden = not self.draws or rank() != 0
        self._bar = tqdm(total=total, initial=done, desc=description, disable=hidden, dynamic_ncols=True)
        self._device, self._total, self._first, self._done = device, total, done, done
        self._start = self._since = time.monotonic()
        self._tokens = 0  # since then

    def advance(self, metrics: Mapping[str, float] | None = None, tokens: int = 0) -> None:
        """Advance by one step, with its metrics and its number of tokens."""
        self._tokens, self._done = self._tokens + tokens, self._done + 1
        if metrics is not None and not self._bar.disable:
            shown = _shown(metrics)
            shown |= {"tok/s": f"{self._speed():.0f}", "mem": f"{memory_gib(self._device):.1f}G"}
            self._bar.set_postfix(shown, refresh=False)
        self._bar.update()

    def watch(self, items: Sequence[Item], passes: int = 1) -> Sequence[Item]:
        """Wrap ``items`` so that each access advances the bar; expects ``passes`` passes over them."""
        self._bar.reset(total=len(items) * passes)
        return Watched(items, self.advance)

    def line(self, metrics: Mapping[str, float], epoch: float) -> str:
        """The newest step in one line, with its metrics, the speed since the previous line and the time left."""
        parts = [f"epoch {epoch:.3g}", *map(" ".join, _shown(metrics).items())]
        parts += [f"lr {metrics['learning_rate']:.3g}"] if "learning_rate" in metrics else []
        parts += [f"{self._speed():,.0f} tokens/s", f"{memory_gib(self._device):.1f} GiB"]
        self._tokens, self._since = 0, time.monotonic()
        taken, left = self._done - self._first, self._total - self._done
        parts += [f"{duration(left * (self._since - self._start) / taken)} left"] if taken and left else []
        return f"step {_of(self._done, self._total)}: {', '.join(parts)}"

    def _speed(self) -> float:
        return self._tokens / max(time.monotonic() - self._since, 1e-9)

    def close(self) -> None:
        """Close the bar, leaving it displayed."""
        self._bar.close()


class Watched(Sequence[Item]):
    """A sequence that calls ``taken`` at each access; ``newest`` is the item of the latest one."""

    def __init__(self, items: Sequence[Item], taken: Callable[[], None]) -> None:
        self._items, self._taken = items, taken
        self.newest: Item | None = None

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:  # type: ignore[override]
        self.newest = item = self._items[index]
        self._taken()
        return item
