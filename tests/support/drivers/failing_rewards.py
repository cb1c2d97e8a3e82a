"""Two ranks, on rank 1 of which a reward function or a judge fails: every rank gets one error, the same, and in time.

Usage: failing_rewards.py OUT.json; at last a failure that nobody catches, as in a run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from alignment.cli.guarded import guarded
from alignment.config.errors import RewardError
from alignment.engines.collectives import gathered
from alignment.rewards import callables
from alignment.rewards.combined import Rewards
from alignment.rewards.functions import FunctionReward
from alignment.rewards.judges import Judge
from alignment.rewards.samples import Samples
from alignment.run.ranks import rank
from alignment.run.stop import Cut, StopReason, StopRequests


class Model:
    """Calls a collective, as a reward model does: it hangs if not every rank comes."""

    name, truncated, calls = "model", 0, 0

    def score(self, samples: Samples) -> list[float | None]:
        self.calls += 1
        total: float = sum(gathered(float(len(samples))))
        return [total] * len(samples)

    def close(self) -> None: ...


def samples(count: int) -> Samples:
    """``count`` samples of this rank."""
    texts: list[Any] = ["text"] * count
    places = [f"rank {rank()}'s row {number}" for number in range(count)]
    return Samples(texts, texts, [[1]] * count, [True] * count, {}, places, [{}] * count)


def length(completions: list[str]) -> list[float]:
    """Fails on rank 1."""
    if rank() == 1:
        raise KeyError("answer")
    return [1.0] * len(completions)


def judge(prompts: list[str], pairs: list[list[str]]) -> list[int]:
    """Fails on rank 1."""
    return [2 if rank() == 1 else 0 for _ in pairs]


def message(act: Callable[[], Any]) -> str:
    """The message, on any rank."""
    try:
        act()
    except RewardError as error:
        return f"{error} [{type(error.__cause__).__name__}]"
    except Cut:
        return "cut"
    return "nothing"


def while_stopping() -> str:
    """The judge's failure on rank 1, while only rank 0 knows that the run has to stop."""
    requests = StopRequests()
    if rank() == 0:
        requests.request(StopReason.SIGTERM)
    with mock.patch.object(callables, "REQUESTS", requests), requests.deferred(None):
        return message(lambda: Judge(judge).verdicts(["p"], [["a", "b"]], 0, [f"row {rank()}"]))


def main() -> None:
    """All cases; every rank's messages are written by the first."""
    said: dict[str, list[str]] = {}
    model = Model()

    def rewards(function: Callable[..., Any]) -> Rewards:
        return Rewards([FunctionReward(function), model])

    said["one"] = gathered(message(lambda: rewards(length).score(samples(2))))
    said["two"] = gathered(message(lambda: rewards(lambda completions: [1.0]).score(samples(2))))
    said["empty"] = gathered(message(lambda: rewards(length).score(samples(2 * rank()))))
    said["judge"] = gathered(message(lambda: Judge(judge).verdicts(["p"], [["a", "b"]], 0, [f"row {rank()}"])))
    said["stopping"] = gathered(while_stopping())
    assert model.calls == 0, "a reward model ran although a function had failed"
    # Rank 1 has no samples: its function is not called, the model is.
    scores = rewards(length).score(samples(2 - 2 * rank()))
    said["good"] = gathered(str(scores.total))
    if rank() == 0:
        Path(sys.argv[-1]).write_text(json.dumps(said))
    rewards(length).score(samples(1))


if __name__ == "__main__":
    sys.exit(guarded(main, use_cpu=True))
