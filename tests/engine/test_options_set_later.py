"""Options set on ``trainer.args`` after the trainer was created: those accepted are those that it has not read yet."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.helpers import make_model, options, unpaired_rows

from alignment import KTOConfig, KTOTrainer
from alignment.config.fields import EARLY, LATE, marked, option_fields
from alignment.training.bad_steps import BadStep, BadSteps

AT_TRAINING, AT_BUILDING = marked(KTOConfig, LATE), marked(KTOConfig, EARLY)
OPTIONS = frozenset(field.name for field in option_fields(KTOConfig))
# These functions of the configuration read all options, whatever a run needs.
READ_ALL = ("sealed", "check_late", "to_dict", "__setattr__", "__repr__")
# If the folder holds an earlier run; by the memory plan on GPUs; by the key of a precomputed reference.
OTHERWISE_READ_AT_CREATION = {
    "overwrite_output_dir", "gradient_checkpointing", "gradient_checkpointing_kwargs", "attn_implementation",
}  # fmt: skip
READS: list[set[str]] = []  # the options read in each phase, the current one last


@dataclass(kw_only=True)
class Recorded(KTOConfig):
    """Options that record when they are read."""

    def __getattribute__(self, name: str) -> Any:
        if name in OPTIONS and READS and not _all_are_read():
            READS[-1].add(name)
        return super().__getattribute__(name)


def _all_are_read() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in READ_ALL:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def run(model: str, folder: Path, **more: Any) -> tuple[set[str], set[str], set[str]]:
    """Return the options that a run reads when the trainer is created, when its engines are built, and in training."""
    settings = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1, "on_bad_step": "skip", **more}
    args = Recorded(**options(folder, **settings, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True))
    try:
        READS.append(set())
        trainer = KTOTrainer(model, args=args, train_dataset=unpaired_rows(8), eval_dataset=unpaired_rows(4, seed=3))
        READS.append(set())
        trainer.build_engines()
        READS.append(set())
        trainer.train()
        return READS[0], READS[1], READS[2]
    finally:
        READS.clear()
        trainer.close()


def test_options_are_accepted_until_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_process_group: None
) -> None:
    spikes, original = [BadStep("a spike", "loss spike")], BadSteps.check

    def check(self: BadSteps, loss: float) -> None:
        original(self, loss)
        if self.state_dict()["losses"] and spikes:
            raise spikes.pop()

    monkeypatch.setattr(BadSteps, "check", check)
    model = make_model(tmp_path / "model", "untied")
    created, built, trained = run(model, tmp_path)
    *_, resumed = run(model, tmp_path, resume_from_checkpoint="latest", resume_anyway=True)
    assert not spikes, "the first run had a bad step"
    later = trained | resumed
    assert AT_TRAINING - later == set(), "accepted later, but not read any more"
    assert AT_BUILDING - built == set(), "accepted before the engines are built, but not read by them"
    created |= OTHERWISE_READ_AT_CREATION
    assert later - created - built - AT_TRAINING == set(), "first read in training, but refused after creation"
    assert built - created - AT_BUILDING == set(), "first read by the engines, but refused after creation"
