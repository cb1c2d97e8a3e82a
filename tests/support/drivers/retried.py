"""Two short runs of Online DPO on two ranks; in the second, data and a reward function fail at first.

Usage: retried.py FOLDER MODEL. FOLDER/plain and FOLDER/retried are the output folders; ``NAME-RANK.json`` next to
them has the log of each rank.
"""

from __future__ import annotations

import errno
import json
import random
import sys
from pathlib import Path
from unittest import mock

from support.drivers.canned import LONGEST
from support.drivers.runs import canned
from support.helpers import options, paired_rows, train_and_close

from alignment import OnlineDPOConfig, OnlineDPOTrainer
from alignment.cli.guarded import guarded
from alignment.data.mixture import Part
from alignment.rollout.engine import RolloutEngine
from alignment.run.ranks import local_rank, rank

ROWS = [{"prompt": row["prompt"]} for row in paired_rows(8, 3)]


class Flaky:
    """A reward function that draws random numbers, and a source of rows; each fails in some of its calls.

    Args:
        failing: indices of the function calls that fail on rank 1.
        unread: number of failing reads.
    """

    def __init__(self, failing: set[int], unread: int) -> None:
        self.failing, self.unread, self.calls = failing, unread, 0

    def rows(self) -> list[dict[str, str]]:
        assert local_rank() == 0
        if self.unread:
            self.unread -= 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return ROWS

    def score(self, completions: list[str]) -> list[float]:
        self.calls += 1
        drawn = [random.random() for _ in completions]
        if rank() == 1 and self.calls in self.failing:
            raise ConnectionResetError("peer closed connection")
        return drawn


def train(folder: Path, model: str, flaky: Flaky) -> None:
    """Train one run."""
    given = options(folder.parent, max_steps=3, retry_pause=0.01, save_strategy="steps", save_steps=3)
    given |= {"output_dir": str(folder), "gradient_accumulation_steps": 1, "max_new_tokens": LONGEST, "retries": 2}
    del given["max_prompt_length"]
    trainer = OnlineDPOTrainer(
        model, args=OnlineDPOConfig(**given), reward_funcs=flaky.score, train_dataset=Part("train_dataset", flaky.rows)
    )
    train_and_close(trainer)
    Path(f"{folder}-{rank()}.json").write_text(json.dumps(trainer.state.log_history))


def main() -> None:
    """Train both runs."""
    RolloutEngine.generate = canned  # type: ignore[method-assign]
    mock.patch("alignment.training.run_page.draw_page").start()
    folder, model = Path(sys.argv[1]), sys.argv[2]
    train(folder / "plain", model, Flaky(set(), 0))
    train(folder / "retried", model, Flaky({2, 4, 5}, 2))


if __name__ == "__main__":
    sys.exit(guarded(main))
