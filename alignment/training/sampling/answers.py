"""``generate_during_eval``: at each evaluation, a table of prompts with completions of policy and reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from alignment.training.sampling.sampler import Sampler, Speaker, first_prompts, interleaved, speaker_of
from alignment.training.sampling.settings import of_model, sampling_of

_SHOWN = 160  # characters per text on the terminal


class EvaluationAnswers:
    """Writes tables to ``completions.jsonl``, the reporting integrations and the progress output.

    The prompts are the first distinct ones of each set. Every evaluation uses the same prompts and random
    numbers, so that tables show what training changed. The reference does not change and is sampled once.

    Args:
        context: the run.
        options: the run's options.
        in_run: whether this run may write to the file.
    """

    def __init__(self, context: RunContext, options: SequenceOptions, in_run: Callable[[], bool]) -> None:
        self.context, self.options, self.in_run = context, options, in_run
        self.sampler = Sampler(context)
        path = context.output_dir / COMPLETIONS if context.is_first else None
        self.table = CompletionTable(path, context.events.handler.callbacks)
        self._reference: dict[str, list[str]] = {}  # by key of the set
        self._told: set[str] = set()
        self._step, self._written = -1, list[str]()  # sets whose tables are written for the newest step
        self._before: tuple[int, list[str]] = (-1, [])  # the same from a checkpoint within an evaluation

    def __call__(self, models: Models, data: PreparedData, name: str) -> None:
        """Sample and write the table of one set; collective.

        Args:
            models: the run's models.
            data: the set.
            name: prefix of the set's metrics.

        Raises:
            Cut: if the run was asked to stop; nothing was written; on every rank.
            OutputError: if the file cannot be written.
        """
        step = self.context.state.global_step
        before, self._before = self._before, (-1, [])
        if before[0] == step and data.key in before[1]:
            self._before = before
            return  # an interrupted evaluation is repeated
        rows = self._rows(models, data)
        if rows and self.context.is_first:
            if self.in_run():
                self.table.write(step, [{"dataset": name, **row} for row in rows])
            self._show(step, name, rows)
        if step != self._step:
            self._step, self._written = step, []
        self._written.append(data.key)

    def _rows(self, models: Models, data: PreparedData) -> list[dict[str, Any]]:
        options, context = self.options, self.context
        policy = Speaker(models.policy)
        prompts = first_prompts(data, options.num_completions_to_log)
        own = of_model(policy.model.generation_config)
        sampling = sampling_of(own, context.processing_class, options.max_new_tokens)
        prompts, sampling = self.sampler.fitting(policy.model, prompts, sampling)
        if not prompts:
            self._tell(f"{data.where}: no row has a prompt short enough for a completion, so none is sampled")
            return []
        with context.phases.of_evaluation():
            columns = {"prompt": self.sampler.decoded(prompts)}
            columns["policy"] = self.sampler.answers(policy, prompts, sampling)
            reference = speaker_of(models.reference)
            if reference is not None:
                if data.key not in self._reference:
                    self._reference[data.key] = self.sampler.answers(reference, prompts, sampling)
                columns["reference"] = self._reference[data.key]
            else:
                self._tell(self._why_alone(models))
        return list(interleaved(list(columns), list(columns.values())))

    def _why_alone(self, models: Models) -> str:
        kept = isinstance(models.reference, PrecomputedReference)
        why = "a precomputed reference has no model" if kept else f"{self.context.args.method} has no reference"
        return f"{why}, so the tables contain only the policy's completions"

    def _tell(self, text: str) -> None:
        """Print a message once per run."""
        if text not in self._told:
            self._told.add(text)
            tell(f"generate_during_eval: {text}")

    def _show(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        lines = [f"step {step}: completions for {len(rows)} prompts of {name}"]
        width = max(map(len, rows[0]))
        for row in rows:
            lines += [f"  {column.ljust(width)}  {shortened(text)!r}" for column, text in row.items()]
        if self.context.args.disable_tqdm:
            tell("\n".join(lines))
        else:
            tqdm.write("\n".join(lines))  # above any progress bars

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
        self._before = (self._step, list(self._written))


def shortened(text: str) -> str:
    """Return the text, or its beginning and end."""
    half = _SHOWN // 2
    return text if len(text) <= _SHOWN else f"{text[:half]} … {text[-half:]}"


def answers_of(context: RunContext, in_run: Callable[[], bool]) -> EvaluationAnswers:
    """Return the run's tables if enabled, registered as part of its state; see :class:`EvaluationAnswers`."""
    options = context.args
    assert isinstance(options, SequenceOptions) and options.generate_during_eval
    if not context.data.eval:
        tell("generate_during_eval: no evaluation data, so nothing is sampled")
    return context.run_state.register("answers", EvaluationAnswers(context, options, in_run))
