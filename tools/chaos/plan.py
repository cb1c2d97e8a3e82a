"""Who is killed, where and when: drawn from a seed and a number, so that any run can be made again."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tools.chaos.world import METHODS

_LONGEST = 8  # kills of one run
_NAMED = 0.5  # the share of kills at a named point; the others are at random moments
_ENDS_ITSELF = 0.06  # the share where the other rank has to notice, which takes it up to 10 s


@dataclass(frozen=True)
class Point:
    """A place to die at.

    Attributes:
        event: of :mod:`.events`.
        ranks: that come to it.
        resumed: only where there is a checkpoint to continue from.
        method: the only one that comes to it; "" for all.
        occurrences: how often one attempt comes to it, at least.
    """

    event: str
    ranks: tuple[int, ...] = (0,)
    resumed: bool = False
    method: str = ""
    occurrences: int = 2


_BOTH = (0, 1)
POINTS = {
    "before the model is written": Point("before model in save"),
    "after the model is written": Point("after model in save"),
    "before the tokenizer is written": Point("before tokenizer in save"),
    "after the tokenizer is written": Point("after tokenizer in save"),
    "between two of the model's files": Point("before rename new/model.safetensors"),
    "before the fragments are written": Point("before fragments in save", _BOTH),
    "in the middle of the fragments": Point("half write new/optimizer.safetensors", _BOTH),
    "after the fragments are written": Point("after fragments in save", _BOTH),
    "before a rank's state is written": Point("before rename new/run_state.json", _BOTH),
    "after a rank's state is written": Point("after rename new/run_state.json", _BOTH),
    "before the trainer's state is written": Point("before rename new/trainer_state.json"),
    "after the trainer's state is written": Point("after rename new/trainer_state.json"),
    "before the manifest is written": Point("before rename new/manifest.json"),
    "after the manifest is written": Point("after rename new/manifest.json"),
    "before the checkpoint is renamed": Point("before rename checkpoint"),
    "after the checkpoint is renamed": Point("after rename checkpoint"),
    "before an old checkpoint is hidden": Point("before rename removed", occurrences=1),
    "after an old checkpoint is hidden": Point("after rename removed", occurrences=1),
    "between two files of an old checkpoint": Point("after remove old/model.safetensors", occurrences=1),
    "after an old checkpoint is removed": Point("after remove removed", occurrences=1),
    "before the lock is taken": Point("before link .lock", occurrences=1),
    "after the lock is taken": Point("after link .lock", occurrences=1),
    "before a stale lock is moved": Point("before rename .lock.old", resumed=True, occurrences=1),
    "after a stale lock is moved": Point("after rename .lock.old", resumed=True, occurrences=1),
    "in the middle of a log line": Point("half append log.jsonl", occurrences=3),
    "in the middle of a completion's line": Point("half append completions.jsonl", method="online_dpo", occurrences=3),
    "before the log is cut back": Point("before cut log.jsonl", resumed=True, occurrences=1),
    "after the log is cut back": Point("after cut log.jsonl", resumed=True, occurrences=1),
    "within a rollout": Point("after forward in rollout", _BOTH, method="online_dpo", occurrences=20),
    "within an evaluation": Point("after forward in evaluate", _BOTH),
    "while checksums are compared": Point("after comparing checksums in folder", _BOTH, resumed=True, occurrences=1),
    "before fragments are read": Point("before reading fragments in load", _BOTH, resumed=True, occurrences=1),
    "between two tensors that are read": Point("after reading a tensor in load", _BOTH, resumed=True, occurrences=2),
    "after fragments are read": Point("after reading fragments in load", _BOTH, resumed=True, occurrences=1),
    "while the final model is written": Point("before rename model.safetensors", occurrences=1),
    "after the final model is written": Point("after tokenizer in end", occurrences=1),
}


@dataclass(frozen=True)
class Kill:
    """One kill.

    Attributes:
        ranks: that are killed.
        point: the name of a place; None: at a moment.
        occurrence: the so-manieth time that the place is come to.
        moment: share of the attempt's expected duration.
        node_lost: the other rank is killed a moment later; otherwise it has to notice and end by itself.
    """

    ranks: tuple[int, ...]
    point: str | None = None
    occurrence: int = 1
    moment: float = 0.0
    node_lost: bool = True

    def __str__(self) -> str:
        where = f"at {self.moment:.0%} of its time" if self.point is None else f"{self.point} ({self.occurrence})"
        other = "" if len(self.ranks) > 1 or self.node_lost else ", the other ends by itself"
        return f"rank {' and '.join(map(str, self.ranks))} {where}{other}"


@dataclass(frozen=True)
class Chain:
    """A run that is killed several times, and then left alone.

    Attributes:
        name: for the record.
        method: of alignment.
        kills: one for each start.
    """

    name: str
    method: str
    kills: tuple[Kill, ...]


def drawn(seed: int, number: int) -> Chain:
    """The so-manieth run of a seed; methods take turns."""
    rng = random.Random(f"{seed} {number}")
    method = METHODS[number % len(METHODS)]
    kills = tuple(_drawn_kill(rng, method, first=place == 0) for place in range(rng.randint(3, _LONGEST)))
    return Chain(str(number), method, kills)


def _drawn_kill(rng: random.Random, method: str, first: bool) -> Kill:
    if rng.random() >= _NAMED:
        return random_kill(rng)
    names = [name for name, point in POINTS.items() if point.method in ("", method) and not (first and point.resumed)]
    name = rng.choice(names)
    point = POINTS[name]
    node_lost = rng.random() >= _ENDS_ITSELF
    return Kill((rng.choice(point.ranks),), name, rng.randint(1, point.occurrences), node_lost=node_lost)


def random_kill(rng: random.Random) -> Kill:
    """At a random moment, of a random rank or both."""
    ranks = rng.choice(((0,), (1,), (0, 1)))
    return Kill(ranks, moment=rng.random(), node_lost=len(ranks) == 1 and rng.random() >= _ENDS_ITSELF)
