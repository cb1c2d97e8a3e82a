"""Output of a trainer: printed lines, log records, resolved settings, the report and the model card's subject."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerState

from alignment.checkpoint.run_folder import RunFolder
from alignment.config.options import AlignmentConfig
from alignment.data.windows import WindowSampler
from alignment.engines.launch_env import rank
from alignment.models.source import ModelSource
from alignment.models.tasks import CAUSAL_LM
from alignment.planning.engines import EnginePlan
from alignment.references.engine import ReferencePlan
from alignment.reporting.durable import write_json
from alignment.reporting.log import JsonlLog, strict
from alignment.run.retries import Retries
from alignment.training.callbacks import Events
from alignment.training.context import Resources, RunContext
from alignment.training.hub.card import Subject
from alignment.training.method import AnyMethod
from alignment.training.run_engines import RunEngines
from alignment.training.summary import write_report


class TrainerRecords:
    """The part of a trainer that produces output."""

    args: AlignmentConfig
    state: TrainerState
    method: AnyMethod
    events: Events
    retries: Retries
    resources: Resources
    context: RunContext
    engines: RunEngines
    engine_plan: EnginePlan
    policy_source: ModelSource
    sampler: WindowSampler | None
    folder: RunFolder
    output_dir: Path
    log_file: JsonlLog

    def _subject(self) -> Subject:
        """Return what a model card says about the model."""
        name = self.policy_source.name
        return Subject(
            title=(self.args.hub_model_id or self.output_dir.absolute().name).split("/")[-1],
            base=name if isinstance(name, str) and name else None,
            is_classifier=self.method.task is not CAUSAL_LM,
            is_adapter=self.engine_plan.adapters is not None,
            tags=list(getattr(self.engines.model, "model_tags", None) or ()),
        )

    def tell(self, text: str | None) -> None:
        """Print a line on the first rank; does nothing for None."""
        if text is not None and rank() == 0:
            print(text, flush=True)

    def log(self, logs: Mapping[str, float], start_time: float | None = None) -> None:
        """Add a record to ``state.log_history`` and to ``log.jsonl``, and notify the callbacks.

        Args:
            logs: the record.
            start_time: ignored; subclasses pass it because transformers' method has it. Records with a speed
                already contain it.
        """
        entry = strict({**logs, "step": self.state.global_step})
        if self.state.epoch is not None:
            entry.setdefault("epoch", self.state.epoch)
        self.events("on_log", logs={name: value for name, value in entry.items() if name != "step"})
        self.state.log_history.append(entry)
        if self.args.disable_tqdm and rank() == 0:
            print(json.dumps(entry), flush=True)
        if self._writes_logs:
            self.retries.write(self.log_file.write)
            self.log_file.write(entry)

    @property
    def _writes_logs(self) -> bool:
        """Whether this trainer may write to the files in the output folder."""
        return self.sampler is not None and not self.folder.held_by_earlier_run

    def settings(self) -> dict[str, Any]:
        """Return the resolved settings of the run by the names of files in the output folder."""
        files = {"options.json": self.args.to_dict(), "deepspeed.json": self.engine_plan.policy}
        reference = self.engine_plan.reference
        if isinstance(reference, ReferencePlan):
            files["ref_deepspeed.json"] = reference.frozen.ds_config
        return files | self.resources.settings()

    def write_report(self, *, show: bool) -> None:
        """Write ``report.md``, and print it if ``show``. All ranks must call it."""
        write_report(self.context, self.engines, show=show)

    def _write_settings(self) -> None:
        """Write the resolved settings on the first rank."""
        for name, content in self.settings().items():
            write_json(self.output_dir / name, content)
