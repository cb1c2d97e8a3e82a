"""``generate_during_eval``: at each evaluation, a table of prompts with completions of policy and reference.

Sampling affects neither training nor its random streams.
"""

from __future__ import annotations

import contextlib
import functools
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from transformers import GenerationConfig

from alignment.checkpoint.run_folder import COMPLETIONS
from alignment.config.options_data import SequenceOptions
from alignment.engines.collectives import gathered
from alignment.engines.scoring import ScoringEngine
from alignment.internals.peft import computing_with
from alignment.references.adapter import AdapterReference
from alignment.references.base import Reference
from alignment.references.engine import EngineReference
from alignment.references.precomputed import PrecomputedReference
from alignment.reporting.log import CompletionTable
from alignment.reporting.progress import say
from alignment.rollout.backend import RolloutRequest, Sampling, continuations
from alignment.rollout.engine import RolloutEngine
from alignment.rollout.processors import ACCEPTED
from alignment.run.ranks import rank, tell, world_size
from alignment.training.context import RunContext
from alignment.training.data import PreparedData
from alignment.training.method import Models

_SHORT = reprlib.Repr()  # of texts on the terminal
_SHORT.maxstring = 160
_STREAM = 4  # of random numbers, other than those of training and Online DPO
# A model that can generate: its engine, and a context in which the engine computes as that model.
Speaker: TypeAlias = tuple[ScoringEngine, contextlib.AbstractContextManager[None]]


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
        self.finish = self.table.finish  # at the end of a run
        self._reference: dict[str, list[str]] = {}  # by key of the set
        self._tell_once = functools.cache(lambda text: tell(f"generate_during_eval: {text}"))
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
                self.table.write_table(step, [{"dataset": name, **row} for row in rows])
            lines = [f"step {step}: completions for {len(rows)} prompts of {name}"]
            lines += [
                f"  {column:<{max(map(len, row))}}  {_SHORT.repr(row[column])}" for row in rows for column in row
            ]
            say("\n".join(lines))
        self._written = [*(self._written if step == self._step else ()), data.key]
        self._step = step

    def rehearse(self, models: Models) -> None:
        """Sample completions that only end at their limit, from all models, and keep none of them; collective."""
        speakers: list[Speaker | None] = [(models.policy, contextlib.nullcontext()), speaker_of(models.reference)]
        with self.context.phases.of_evaluation():
            for data in self.context.data.eval.values():
                first, sampling = self._prompts(models, data)
                for speaker in filter(None, speakers if first else ()):
                    completions(self.context, speaker, [*first], replace(sampling, eos_token_ids=()))

    def _prompts(self, models: Models, data: PreparedData) -> tuple[dict[tuple[int, ...], bool], Sampling]:
        """Return whether each of the prompts is truncated, and the distribution of their completions."""
        options, model = self.context.args, models.policy.scorer.model
        assert isinstance(options, SequenceOptions)
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
        first = first_prompts(data, options.num_completions_to_log)
        first = {ids: cut for ids, cut in first.items() if len(ids) < limit}
        room = limit - max(map(len, first), default=0)
        tokenizer = self.context.processing_class
        return first, sampling_of(model.generation_config, tokenizer, min(options.max_new_tokens, room))

    def _rows(self, models: Models, data: PreparedData) -> list[dict[str, str]]:
        context, options, tokenizer = self.context, self.context.args, self.context.processing_class
        assert isinstance(options, SequenceOptions)
        first, sampling = self._prompts(models, data)
        if not first:
            self._tell_once(f"{data.where}: no row has a prompt short enough for a completion, so none is sampled")
            return []
        prompts, reference = [*first], speaker_of(models.reference)
        with context.phases.of_evaluation():
            decode = functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False)
            starts = [cut and options.truncation_mode == "keep_end" for cut in first.values()]
            columns = {"prompt": ["…" * cut + decode(list(ids)) for ids, cut in zip(prompts, starts)]}
            columns["policy"] = completions(context, (models.policy, contextlib.nullcontext()), prompts, sampling)
            if reference is not None:
                if data.key not in self._reference:
                    self._reference[data.key] = completions(context, reference, prompts, sampling)
                columns["reference"] = self._reference[data.key]
            else:
                kept = isinstance(models.reference, PrecomputedReference)
                why = "a precomputed reference has no model" if kept else f"{options.method} has no reference"
                self._tell_once(f"{why}, so the tables contain only the policy's completions")
        return [dict(zip(columns, values)) for values in zip(*columns.values())]

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the file, and which tables of the newest step it contains."""
        return {"table": self.table.state_dict(), "step": self._step, "written": list(self._written)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self.table.load_state_dict(state["table"])
        self._step, self._written = state["step"], list(state["written"])
        self._before = {(self._step, key) for key in self._written}


def speaker_of(reference: Reference | None) -> Speaker | None:
    """Return the reference if its model is available; None without a reference, or if only log-probs are stored."""
    if isinstance(reference, AdapterReference):
        return reference.policy, computing_with(reference.policy.scorer, reference.given.adapter)
    return (reference.engine, contextlib.nullcontext()) if isinstance(reference, EngineReference) else None


def first_prompts(data: PreparedData, count: int) -> dict[tuple[int, ...], bool]:
    """Return whether each of the first ``count`` distinct prompts is truncated. Rows without one have BOS at most."""
    found: dict[tuple[int, ...], bool] = {}
    for row in data.dataset.select_columns(["prompt_ids", "prompt_cut"]):
        if len(found) == count:
            break
        if len(row["prompt_ids"]) > 1:
            found.setdefault(tuple(row["prompt_ids"]), row["prompt_cut"])
    return found


def completions(
    context: RunContext, speaker: Speaker, prompts: Sequence[tuple[int, ...]], sampling: Sampling
) -> list[str]:
    """Sample a completion for each prompt, with the same seed each time; return all texts, in order. Collective.

    Raises:
        Cut: if the run was asked to stop; on every rank.
    """
    engine, computing = speaker
    own = [list(prompt) for prompt in prompts[rank() :: world_size()]]
    longest = max(map(len, prompts)) + sampling.max_new_tokens
    rollout = RolloutEngine(engine, batch_size=context.args.eval_batch_size, longest_context=longest)
    seed = int(np.random.SeedSequence([context.args.seed, _STREAM, rank()]).generate_state(1)[0])
    with context.phases("answers") as record, computing:
        found = [group[0].ids for group in rollout.generate(RolloutRequest(own, 1, sampling, seed))]
        record.tokens += sum(map(len, own)) + sum(map(len, found))
    tokenizer = context.processing_class
    everyone = gathered([continuations(prompt, [list(ids)], tokenizer)[0] for prompt, ids in zip(own, found)])
    return [everyone[number % world_size()][number // world_size()] for number in range(len(prompts))]


def sampling_of(config: GenerationConfig, tokenizer: Any, max_new_tokens: int) -> Sampling:
    """Return the distribution of a checkpoint's configuration, without its lengths and beams, drawn even if greedy.

    Unset fields have neutral values. The tokenizer's EOS token also ends a completion.
    """
    ends = token_ids(tokenizer.eos_token_id) | token_ids(config.eos_token_id)
    extra = {name: getattr(config, name, None) for name in ACCEPTED}
    return Sampling(
        max_new_tokens=max_new_tokens,
        eos_token_ids=tuple(sorted(ends)),
        pad_token_id=min(ends, default=0) if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        temperature=config.temperature or 1.0,
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=config.top_k or 0,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty or 1.0,
        extra={name: value for name, value in extra.items() if value is not None},
    )


def token_ids(value: int | Sequence[int] | None) -> set[int]:
    """Return one id, several or none as a set."""
    return set() if value is None else {value} if isinstance(value, int) else set(value)
