"""``generate_during_eval``: at each evaluation, a table of prompts with completions of policy and reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tqdm.auto import tqdm

from alignment.checkpoint.run_folder import COMPLETIONS
from alignment.config.options_data import SequenceOptions
from alignment.references.precomputed import PrecomputedReference
from alignment.reporting.completions import CompletionTable
from alignment.run.console import tell
from alignment.training.context import RunContext
from alignment.training.data import PreparedData
from alignment.training.method import Models
from alignment.training.sampling.sampler import (
    Speaker,
    completions,
    decoded,
    first_prompts,
    fitting,
    of_model,
    sampling_of,
    speaker_of,
)

_SHOWN = 160  # characters per text on the terminal


class EvaluationAnswers:
    """Writes tables to ``completions.jsonl``, the reporting integrations and the progress output.

    The prompts are the first distinct ones of each set. Every evaluation uses the same prompts and random
    numbers, so that tables show what training changed. The reference does not change and is sampled once.

    ``in_run`` tells whether this run may write to the file. Tables are part of the run's state.
    """

    def __init__(self, context: RunContext, in_run: Callable[[], bool]) -> None:
        self.context, self.in_run = context, in_run
        path = context.output_dir / COMPLETIONS if context.is_first else None
        self.table = CompletionTable(path, context.events.handler.callbacks)
        self._reference: dict[str, list[str]] = {}  # by key of the set
        self._told: set[str] = set()
        self._step, self._written = -1, list[str]()  # sets whose tables are written for the newest step
        self._before: set[tuple[int, str]] = set()  # the same from a checkpoint within an evaluation
        context.run_state.register("answers", self)
        if not context.data.eval:
            tell("generate_during_eval: no evaluation data, so nothing is sampled")

    def __call__(self, models: Models, data: PreparedData, name: str) -> None:
        """Sample and write the table of one set, whose metrics have the prefix ``name``; collective.

        Raises:
            Cut: if the run was asked to stop; nothing was written; on every rank.
            OutputError: if the file cannot be written.
        """
        step = self.context.state.global_step
        if (step, data.key) in self._before:  # an interrupted evaluation is repeated
            return self._before.remove((step, data.key))
        rows = self._rows(models, data)
        if rows and self.context.is_first:
            if self.in_run():
                self.table.write(step, [{"dataset": name, **row} for row in rows])
            lines = [f"step {step}: completions for {len(rows)} prompts of {name}"]
            width = max(map(len, rows[0]))
            lines += [f"  {column.ljust(width)}  {shortened(row[column])!r}" for row in rows for column in row]
            tell("\n".join(lines)) if self.context.args.disable_tqdm else tqdm.write("\n".join(lines))
        self._written = [*(self._written if step == self._step else ()), data.key]
        self._step = step

    def _rows(self, models: Models, data: PreparedData) -> list[dict[str, Any]]:
        context, options = self.context, self.context.args
        assert isinstance(options, SequenceOptions)
        policy, reference = Speaker(models.policy), speaker_of(models.reference)
        own = of_model(policy.model.generation_config)
        sampling = sampling_of(own, context.processing_class, options.max_new_tokens)
        prompts, sampling = fitting(policy.model, first_prompts(data, options.num_completions_to_log), sampling)
        if not prompts:
            self._tell(f"{data.where}: no row has a prompt short enough for a completion, so none is sampled")
            return []
        with context.phases.of_evaluation():
            columns = {"prompt": decoded(context, prompts)}
            columns["policy"] = completions(context, policy, prompts, sampling, "answers")
            if reference is not None:
                if data.key not in self._reference:
                    self._reference[data.key] = completions(context, reference, prompts, sampling, "answers")
                columns["reference"] = self._reference[data.key]
            else:
                kept = isinstance(models.reference, PrecomputedReference)
                why = "a precomputed reference has no model" if kept else f"{context.args.method} has no reference"
                self._tell(f"{why}, so the tables contain only the policy's completions")
        return [dict(zip(columns, values)) for values in zip(*columns.values())]

    def _tell(self, text: str) -> None:
        """Print a message once per run."""
        if text not in self._told:
            self._told.add(text)
            tell(f"generate_during_eval: {text}")

    def finish(self) -> None:
        """Write rows that are waiting for disk space, at the end of a run."""
        self.table.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the file, and which tables of the newest step it contains."""
        return {"table": self.table.state_dict(), "step": self._step, "written": list(self._written)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self.table.load_state_dict(state["table"])
        self._step, self._written = state["step"], list(state["written"])
        self._before = {(self._step, key) for key in self._written}


def shortened(text: str) -> str:
    """Return the text, or its beginning and end."""
    half = _SHOWN // 2
    return text if len(text) <= _SHOWN else f"{text[:half]} … {text[-half:]}"
