"""What the loop, the evaluation and the report know of a run, instead of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedModel, TrainerState

from alignment.checkpoint.run_state import Identity, RunState
from alignment.config.options import AlignmentConfig
from alignment.engines.phases import Phases
from alignment.planning.plan import Frozen
from alignment.reporting.log import JsonlLog
from alignment.run.retries import Retries
from alignment.training.callbacks import Events
from alignment.training.data import PreparedData, RunData
from alignment.training.memory_plan import RunPlan
from alignment.training.method import AnyMethod, Models
from alignment.training.window import WindowPass


class Answers(Protocol):
    """Writes tables of completions for prompts of evaluation sets; see :mod:`alignment.training.sampling`."""

    def __call__(self, models: Models, data: PreparedData, name: str) -> None: ...

    def rehearse(self, models: Models) -> None: ...

    def finish(self) -> None: ...


@dataclass
class RunContext:
    """A run, as far as it is known before its engines are built.

    Attributes:
        args: the run's options.
        method: the method.
        output_dir: the output folder.
        processing_class: the tokenizer.
        state: transformers' state, which callbacks see.
        events: notifies the callbacks.
        phases: records time, tokens and memory.
        log_file: ``log.jsonl``.
        retries: retry policy for reads of data and reward calls.
        log: adds a record to the log and the history, and notifies the callbacks.
        data: its data.
        answers: generates completions at each evaluation, if enabled.
        memory_plan: the memory that the run is predicted to use; None if that cannot be predicted.
        identity: identifies the run across its attempts.
        run_state: everything that a resume needs; each component registers its own part.
    """

    args: AlignmentConfig
    method: AnyMethod
    output_dir: Path
    processing_class: Any
    state: TrainerState
    events: Events
    phases: Phases
    log_file: JsonlLog
    retries: Retries
    log: Callable[[Mapping[str, float]], None]
    data: RunData
    answers: Answers | None = None
    memory_plan: RunPlan | None = None
    identity: Identity = field(default_factory=Identity)
    run_state: RunState = field(default_factory=RunState)

    def __post_init__(self) -> None:
        self.run_state.register("run", self.identity)
        self.run_state.register("trainer", self.events)
        self.run_state.register_on_each_rank("phases", self.phases)
        self.run_state.register("log", self.log_file)
        self.run_state.register("retries", self.retries)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank."""
        return bool(self.state.is_world_process_zero)


class Resources:
    """What a method needs in addition to policy and reference; nothing by default.

    Resources take part in planning, building and releasing the engines of a run.

    Attributes:
        metrics: names of additional metrics.
    """

    metrics: tuple[str, ...] = ()

    @property
    def frozen(self) -> tuple[Frozen, ...]:
        """The further models that only compute scores."""
        return ()

    def check_data(self, data: PreparedData) -> None:
        """Refuse a dataset that cannot be used, before anything is loaded."""

    def build(self) -> list[str]:
        """Load resources before policy and reference; return lines to print at the start. Collective."""
        return []

    def looked_at(self) -> list[str]:
        """Return lines about external resources for a dry run, on the first rank."""
        return []

    def window_pass(self, context: RunContext, models: Models, aux_coefficient: float | None) -> WindowPass:
        """Return the window pass for these models."""
        return WindowPass(context.method, models, context.phases, aux_coefficient)

    def built(self, model: PreTrainedModel) -> None:
        """Called with the policy's model after its engine is built."""

    def fingerprints(self) -> dict[str, str]:
        """Return fingerprints of the reward sources by name."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Return the resolved settings by the names of files in the output folder."""
        return {}

    def close(self) -> None:
        """Release what :meth:`build` loaded."""
