"""What the loop, evaluation and the report are given of a run, in place of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerState

from alignment.config.options import AlignmentConfig
from alignment.data.windows import WindowSampler
from alignment.engines.phases import Phases
from alignment.reporting.log import JsonlLog
from alignment.trainers.data_setup import PreparedData
from alignment.trainers.events import Events
from alignment.trainers.method import AnyMethod
from alignment.trainers.run_state import RunState


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
        log: adds a record to the log and the history, and tells the callbacks.
        tell: prints a line on the first rank.
        train_data, sampler: the training data and its windows; None for evaluation alone.
        eval_data: the evaluation sets by name.
        advice: sentences about the run that the report repeats.
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
    log: Callable[[Mapping[str, float]], None]
    tell: Callable[[str | None], None]
    train_data: PreparedData | None = None
    sampler: WindowSampler | None = None
    eval_data: dict[str, PreparedData] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank."""
        return bool(self.state.is_world_process_zero)
