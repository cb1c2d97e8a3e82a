"""Killed runs that are restarted with the same command end as if nothing had happened: see ``tools/chaos``.

The chains of named points are ``ci``, so that mutations can be tested with them; random kills are ``faults``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tools.chaos.__main__ import Attempt, Chaos
from tools.chaos.plan import POINTS, Chain, Kill, random_kill
from tools.ranks import RankServer
from tools.trial import workspace


def at(*points: str) -> tuple[Kill, ...]:
    """Return kills at these points, of the last rank that reaches them."""
    return tuple(Kill(POINTS[point].ranks[-1], point) for point in points)


NAMED = [
    Chain(
        "weights",
        "kto",
        (
            *at("before the model is written", "after the model is written", "after the tokenizer is written"),
            *at("between two of the model's files", "before the fragments are written"),
            *at("in the middle of the fragments"),
        ),
    ),
    Chain(
        "states",
        "kto",
        (
            *at("before a rank's state is written", "after a rank's state is written"),
            *at("before the manifest is written", "after the manifest is written", "after the checkpoint is renamed"),
        ),
    ),
    Chain(
        "removal",
        "kto",
        (
            *at("before an old checkpoint is hidden", "after an old checkpoint is hidden"),
            *at("between two files of an old checkpoint", "after an old checkpoint is removed"),
            *at("in the middle of a log line", "before the log is cut back", "after the log is cut back"),
            Kill(0, "after the checkpoint is renamed", occurrence=2),  # the last one: no save follows
            *at("while the final model is written", "after the final model is written"),
        ),
    ),
    Chain(
        "reading",
        "online_dpo",
        (
            *at("before the lock is taken", "after the lock is taken"),
            Kill(0, "within a rollout", occurrence=60, node_lost=False),
            Kill(0, "in the middle of a completion's line", occurrence=7),
            *at("while checksums are compared", "between two tensors that are read"),
            *at("after fragments are read", "within an evaluation"),
        ),
    ),
]
RANDOM_KILLS = 10


LONG = ("reading", "removal")  # names of chains


@pytest.fixture(scope="module")
def chaos(ranks: RankServer) -> Iterator[Chaos]:
    """Runs to be killed, and one undisturbed run of each method."""
    with workspace("chaos-") as folder:
        yield Chaos(ranks, folder)


def ran(chaos: Chaos, chain: Chain) -> list[Attempt]:
    """Run a chain; fail with every problem, its location and the output of the ranks."""
    made = list(chaos.run(chain))
    failures = "\n".join(one.said for one in made if one.problems)
    assert not failures, failures
    return made


def test_every_point_is_reached() -> None:
    named = [kill.point for chain in NAMED for kill in chain.kills]
    assert set(named) == set(POINTS)


@pytest.mark.parametrize(
    "chain",
    [pytest.param(one, marks=pytest.mark.slow if one.name in LONG else pytest.mark.ci) for one in NAMED],
    ids=lambda chain: f"{chain.name}-{chain.method}",
)
def test_named_points(chaos: Chaos, chain: Chain) -> None:
    assert [one.killed for one in ran(chaos, chain)] == [True] * len(chain.kills) + [False]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["kto", "online_dpo"])
def test_random_events(chaos: Chaos, method: str) -> None:
    """A chain ends early if there is no such event."""
    rng, kills = random.Random(f"events of {method}"), 0
    while kills < RANDOM_KILLS:
        chain = Chain(f"{method}-{kills}", method, tuple(random_kill(rng) for _ in range(RANDOM_KILLS - kills)))
        kills += sum(one.killed for one in ran(chaos, chain))
