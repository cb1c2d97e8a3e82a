"""What the loop, evaluation and the report are given of a run, in place of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedModel, TrainerState

from alignment.config.options import AlignmentConfig
from alignment.data.windows import WindowSampler
from alignment.engines.phases import Phases
from alignment.engines.watch.retries import Retries
from alignment.reporting.log import JsonlLog
from alignment.training.callbacks import Events
from alignment.training.data import PreparedData
from alignment.training.method import AnyMethod, Models
from alignment.training.run_state import RunState
from alignment.training.window import WindowPass


class Answers(Protocol):
    """Tables of answers to the prompts of evaluation sets; see :mod:`alignment.training.sampling`."""

    def __call__(self, models: Models, data: PreparedData, name: str) -> None: ...

    def finish(self) -> None: ...


@dataclass
class RunContext:
    """A run, as far as it is known before its engines are built.

    Attributes:
        args: the options.
        method: the method.
        output_dir: where the run writes.
        processing_class: the tokenizer.
        state: transformers' state, which callbacks see.
        events: the callbacks.
        phases: where time, tokens and memory are recorded.
        log_file: ``log.jsonl``.
        run_state: everything that a restart needs; what has such a part registers it.
        retries: of reads of data and reward calls.
        log: adds a record to the log and the history, and tells the callbacks.
        tell: prints a line on the first rank.
        train_data, sampler: the training data and its windows; None for evaluation alone.
        eval_data: the evaluation sets by name.
        advice: sentences about the run that the report repeats.
        answers: what samples at each evaluation, where the options ask for it.
    """

    args: AlignmentConfig
    method: AnyMethod
    output_dir: Path
    processing_class: Any
    state: TrainerState
    events: Events
    phases: Phases
    log_file: JsonlLog
    run_state: RunState
    retries: Retries
    log: Callable[[Mapping[str, float]], None]
    tell: Callable[[str | None], None]
    train_data: PreparedData | None = None
    sampler: WindowSampler | None = None
    eval_data: dict[str, PreparedData] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)
    answers: Answers | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank."""
        return bool(self.state.is_world_process_zero)


class Resources:
    """What a method needs in a run beside policy and reference: nothing, unless its trainer has its own.

    They take part in planning, building and releasing the engines of the run.

    Attributes:
        metrics: the names of what is measured beside the method's.
    """

    metrics: tuple[str, ...] = ()

    def check_data(self, data: PreparedData) -> None:
        """Refuse a dataset that cannot be used, before anything is loaded."""

    def build(self) -> list[str]:
        """Load what is needed, before policy and reference; lines for the start of the run. Collective."""
        return []

    def looked_at(self) -> list[str]:
        """Lines for a dry run, on the first rank, about what is needed from elsewhere."""
        return []

    def window_pass(self, context: RunContext, models: Models, aux_coefficient: float | None) -> WindowPass:
        """The computation of windows with these models."""
        return WindowPass(context.method, models, context.phases, aux_coefficient)

    def built(self, model: PreTrainedModel) -> None:
        """Called with the policy's model once its engine is there."""

    def fingerprints(self) -> dict[str, str]:
        """What stands for the sources of rewards, by name."""
        return {}

    def settings(self) -> dict[str, Any]:
        """What it was resolved to, by the names of files in the output folder."""
        return {}

    def close(self) -> None:
        """Release what :meth:`build` loaded."""
