"""Plan which rank is killed and where, from a seed and a number, so that every run can be replayed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from tools.chaos.world import METHODS

RANKS = 2
_LONGEST = 8  # kills per run
_NAMED = 0.5  # fraction of kills at a named point; the others are at random events
_ENDS_ITSELF = 0.06  # fraction of kills that the other rank must detect, which takes up to 10 s


class Point(NamedTuple):
    """A point at which a rank can be killed: an event of :mod:`.events`, and who reaches it."""

    event: str
    ranks: tuple[int, ...] = (0,)
    occurrences: int = 2  # minimum number of times that an attempt reaches it
    resumed: bool = False  # whether it is only reached if there is a checkpoint to resume from
    method: str = ""  # the only method that reaches it; "" for all


_BOTH = (0, 1)
POINTS = {
    "before the model is written": Point("before model in save"),
    "after the model is written": Point("after model in save"),
    "after the tokenizer is written": Point("after tokenizer in save"),
    "between two of the model's files": Point("before rename new/model.safetensors"),
    "before the fragments are written": Point("before fragments in save", _BOTH),
    "in the middle of the fragments": Point("half write new/optimizer.safetensors", _BOTH),
    "before a rank's state is written": Point("before rename new/run_state.json", _BOTH),
    "after a rank's state is written": Point("after rename new/run_state.json", _BOTH),
    "before the manifest is written": Point("before rename new/manifest.json"),
    "after the manifest is written": Point("after rename new/manifest.json"),
    "after the checkpoint is renamed": Point("after rename checkpoint"),
    "before an old checkpoint is hidden": Point("before rename removed", occurrences=1),
    "after an old checkpoint is hidden": Point("after rename removed", occurrences=1),
    "between two files of an old checkpoint": Point("after remove old/model.safetensors", occurrences=1),
    "after an old checkpoint is removed": Point("after remove removed", occurrences=1),
    "before the lock is taken": Point("before locking in folder", occurrences=1),
    "after the lock is taken": Point("after locking in folder", occurrences=1),
    "in the middle of a log line": Point("half append log.jsonl", occurrences=3),
    "in the middle of a completion's line": Point("half append completions.jsonl", method="online_dpo", occurrences=3),
    "before the log is cut back": Point("before cut log.jsonl", resumed=True, occurrences=1),
    "after the log is cut back": Point("after cut log.jsonl", resumed=True, occurrences=1),
    "within a rollout": Point("after forward in rollout", _BOTH, method="online_dpo", occurrences=20),
    "within an evaluation": Point("after forward in evaluate", _BOTH),
    "while checksums are compared": Point("after comparing checksums in folder", _BOTH, resumed=True, occurrences=1),
    "between two tensors that are read": Point("after reading a tensor in load", _BOTH, resumed=True, occurrences=2),
    "after fragments are read": Point("after reading fragments in load", _BOTH, resumed=True, occurrences=1),
    "while the final model is written": Point("before rename model.safetensors", occurrences=1),
    "after the final model is written": Point("after tokenizer in end", occurrences=1),
}


@dataclass(frozen=True)
class Kill:
    """A rank is killed at the occurrence of a point, or at a random event."""

    rank: int
    point: str | None = None  # None for a random event
    occurrence: int = 1
    moment: float = 0.0  # fraction of the attempt's expected number of events
    node_lost: bool = True  # whether the other rank is killed too; otherwise it must notice and exit by itself

    def __str__(self) -> str:
        where = f"at {self.moment:.0%} of its events" if self.point is None else f"{self.point} ({self.occurrence})"
        return f"rank {self.rank} {where}{'' if self.node_lost else ', the other exits by itself'}"


@dataclass(frozen=True)
class Chain:
    """A run of a method that is killed in each attempt but the last, which is allowed to finish."""

    name: str
    method: str
    kills: tuple[Kill, ...]


def drawn(seed: int, number: int) -> Chain:
    """Return run ``number`` of a seed. Methods alternate."""
    rng = random.Random(f"{seed} {number}")
    method = METHODS[number % len(METHODS)]
    kills = []
    for place in range(rng.randint(3, _LONGEST)):
        if rng.random() >= _NAMED:
            kills.append(random_kill(rng))
            continue
        reached = [name for name, p in POINTS.items() if p.method in ("", method) and (place or not p.resumed)]
        point = POINTS[name := rng.choice(reached)]
        occurrence = rng.randint(1, point.occurrences)
        kills.append(Kill(rng.choice(point.ranks), name, occurrence, node_lost=rng.random() >= _ENDS_ITSELF))
    return Chain(str(number), method, tuple(kills))


def random_kill(rng: random.Random) -> Kill:
    """Kill a random rank at a random event."""
    return Kill(rng.randrange(RANKS), moment=rng.random(), node_lost=rng.random() >= _ENDS_ITSELF)
