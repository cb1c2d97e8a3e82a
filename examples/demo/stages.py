"""The models of the demo in their order: what each is trained on and with what.

``PREPARED`` are those that others need, ``VARIANTS`` those that are compared; a further method is a further entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from alignment.trainers.base import AlignmentTrainer
from examples.demo.rows import Row, World, labelled_rows, paired_rows, prompt_rows, start_rows
from examples.demo.settings import Settings
from examples.demo.training import (
    Job,
    cpo_trainer,
    kto_trainer,
    online_dpo_trainer,
    reward_trainer,
    start_trainer,
)
from examples.demo.verdict import ONLINE_PROMISE, Promise


@dataclass(frozen=True)
class Stage:
    """A model and how it comes about.

    Attributes:
        name: of its folder, its rows' file and its settings; for all but the start model also the method's.
        title: what the table and the messages call it.
        about: its rows and what is done with them, in a few words.
        rows: makes its training rows.
        trainer: makes its trainer.
        promise: what it has to reach, if it is compared.
    """

    name: str
    title: str
    about: str
    rows: Callable[[World, Settings], list[Row]]
    trainer: Callable[[Job], AlignmentTrainer]
    promise: Promise = Promise()


START = Stage(
    "start",
    "before",
    "half of the answers warm and half curt, supervised training from random weights",
    lambda world, s: start_rows(world.training, s.start.rows, s.seed),
    start_trainer,
)
REWARD = Stage(
    "reward",
    "reward model",
    "pairs of a warm and a curt answer, to score answers with; from the start model",
    lambda world, s: paired_rows(world.training, s.reward.rows, s.seed),
    reward_trainer,
)
PREPARED = (START, REWARD)  # each from the one before it, or from nothing
VARIANTS = (
    Stage(
        "kto",
        "after KTO",
        "single answers, each labelled; from the start model",
        lambda world, s: labelled_rows(world.training, s.kto.rows, s.seed),
        kto_trainer,
    ),
    Stage(
        "cpo",
        "after CPO",
        "pairs of a warm and a curt answer; from the start model",
        lambda world, s: paired_rows(world.training, s.cpo.rows, s.seed),
        cpo_trainer,
    ),
    Stage(
        "online_dpo",
        "after Online DPO",
        "requests alone, with answers of its own that the reward model ranks; from the start model",
        lambda world, s: prompt_rows(world.training, s.online_dpo.rows, s.seed),
        online_dpo_trainer,
        ONLINE_PROMISE,
    ),
)
