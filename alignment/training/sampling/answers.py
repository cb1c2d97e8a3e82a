"""``generate_during_eval``: at each evaluation a table of prompts with the answers of policy and reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tqdm.auto import tqdm

from alignment.config.options_data import SequenceOptions
from alignment.references.precomputed import PrecomputedReference
from alignment.reporting.completions import CompletionTable
from alignment.training.checkpointing.output_folder import COMPLETIONS
from alignment.training.context import RunContext
from alignment.training.data import PreparedData
from alignment.training.method import Models
from alignment.training.sampling.sampler import Sampler, Speaker, first_prompts, interleaved, speaker_of
from alignment.training.sampling.settings import of_model, sampling_of

_SHOWN = 160  # characters of a text on the terminal


class EvaluationAnswers:
    """Writes the tables of a run, into ``completions.jsonl``, the reporting integrations and the progress output.

    The prompts are the first different ones of each set, the same at every evaluation, and drawn for with the same
    random numbers, so that tables show what training changed. A reference does not change: it is asked once.

    Args:
        context: the run.
        options: the run's.
        in_run: whether the file is this run's to write into.
    """

    def __init__(self, context: RunContext, options: SequenceOptions, in_run: Callable[[], bool]) -> None:
        self.context, self.options, self.in_run = context, options, in_run
        self.sampler = Sampler(context)
        path = context.output_dir / COMPLETIONS if context.is_first else None
        self.table = CompletionTable(path, context.events.handler.callbacks)
        self._reference: dict[str, list[str]] = {}  # by the set's key
        self._told: set[str] = set()
        self._step, self._written = -1, list[str]()  # the sets of the newest step whose tables are written
        self._before: tuple[int, list[str]] = (-1, [])  # the same of a run that goes on in the midst of an evaluation

    def __call__(self, models: Models, data: PreparedData, name: str) -> None:
        """Sample and write the table of one set; collective.

        Args:
            models: the run's.
            data: the set.
            name: of the set, as its metrics begin.

        Raises:
            Cut: the run was asked to stop, and nothing was written; on every rank.
            OutputError: the file cannot be written.
        """
        step = self.context.state.global_step
        before, self._before = self._before, (-1, [])
        if before[0] == step and data.key in before[1]:
            self._before = before
            return  # an evaluation that was left in its midst is done again
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
            self._tell(f"{data.where}: its rows have no prompts that leave room for an answer, so none is sampled")
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
        why = "a precomputed reference is no model" if kept else f"{self.context.args.method} has no reference"
        return f"{why}, so the tables hold the policy's answers alone"

    def _tell(self, text: str) -> None:
        """Once in a run."""
        if text not in self._told:
            self._told.add(text)
            self.context.tell(f"generate_during_eval: {text}")

    def _show(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        lines = [f"step {step}: answers to {len(rows)} prompts of {name}"]
        width = max(map(len, rows[0]))
        for row in rows:
            lines += [f"  {column.ljust(width)}  {shortened(text)!r}" for column, text in row.items()]
        if self.context.args.disable_tqdm:
            self.context.tell("\n".join(lines))
        else:
            tqdm.write("\n".join(lines))  # above whatever bars there are

    def finish(self) -> None:
        """Write rows that still wait for space, at the end of a run."""
        self.table.finish()

    def state_dict(self) -> dict[str, Any]:
        """How much of the file there is, and which tables of the newest step are in it."""
        return {"table": self.table.state_dict(), "step": self._step, "written": list(self._written)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.table.load_state_dict(state["table"])
        self._step, self._written = state["step"], list(state["written"])
        self._before = (self._step, list(self._written))


def shortened(text: str) -> str:
    """The text, or its beginning and end."""
    half = _SHOWN // 2
    return text if len(text) <= _SHOWN else f"{text[:half]} … {text[-half:]}"


def answers_of(context: RunContext, in_run: Callable[[], bool]) -> EvaluationAnswers:
    """The tables of a run that asks for them, as a part of its state; see :class:`EvaluationAnswers`."""
    options = context.args
    assert isinstance(options, SequenceOptions) and options.generate_during_eval
    if not context.eval_data:
        context.tell("generate_during_eval: there is no evaluation data, so nothing is sampled")
    return context.run_state.register("answers", EvaluationAnswers(context, options, in_run))
