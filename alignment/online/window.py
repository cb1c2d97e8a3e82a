"""One window of Online DPO: prompts become pairs (rollout, score), then training proceeds as for any window."""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from alignment.checkpoint.run_folder import COMPLETIONS
from alignment.config.fields import keywords
from alignment.config.options_online import OnlineOptions
from alignment.data.batching import AnyBatch
from alignment.data.kinds.prompts import PromptBatch
from alignment.data.windows import WindowPlan
from alignment.engines.collectives import from_first_rank, gathered
from alignment.engines.rng import seeded
from alignment.online.completion_log import CompletionLog
from alignment.online.completions import Generated, described, further_columns
from alignment.online.pairs import Pair, pair_of, plan_pairs, ranked_batches
from alignment.online.ranking import REASONS, FirstAnswer, Ranker, Ranking, RewardRanker
from alignment.reporting.log import CompletionTable
from alignment.reporting.metrics import MetricSums
from alignment.rewards.reward_model import ClassifierReward
from alignment.rollout.backend import Rollout, RolloutRequest, Sampling
from alignment.run.ranks import rank, world_size
from alignment.training.context import RunContext
from alignment.training.data import PreparedData
from alignment.training.method import Models
from alignment.training.sampling import token_ids
from alignment.training.window import WindowPass

# Separate random streams; all evaluations use the same one.
_TRAINING, _EVALUATION = 2, 3
SAMPLING = 5  # of the commands ``sample`` and ``compare``


class Seeds(NamedTuple):
    """Seeds for one rank's share of a window: rollout, user code, and the order in which a judge sees a pair.

    They differ so that user code with its own generator does not repeat the draws of the rollout.
    """

    rollout: int
    code: int
    order: int


def sampling_of(options: OnlineOptions, model: PreTrainedModel, tokenizer: Any) -> Sampling:
    """Return the sampling settings; a completion ends with any EOS of the tokenizer and the model."""
    ends = token_ids(tokenizer.eos_token_id) | token_ids(model.generation_config.eos_token_id)
    pad = tokenizer.pad_token_id
    return Sampling(
        max_new_tokens=options.max_new_tokens,
        eos_token_ids=tuple(sorted(ends)),
        pad_token_id=pad if pad is not None else min(ends, default=0),
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        extra=keywords(options.generation_kwargs),
    )


def window_seeds(seed: int, plan: WindowPlan, rank: int, *, train: bool) -> Seeds:
    """Return the seeds of a window as a function of the run's seed, the window and the rank."""
    stream = (_TRAINING, plan.epoch, plan.step) if train else (_EVALUATION,)
    return seeds_of(seed, *stream, rank)


def seeds_of(*numbers: int) -> Seeds:
    """Return seeds as a function of some numbers."""
    return Seeds(*map(int, np.random.SeedSequence(numbers).generate_state(3)))


class OnlineWindowPass(WindowPass):
    """Computes windows of prompts.

    Args:
        context: the run.
        models: its models.
        aux_coefficient: see :class:`WindowPass`.
        options: the run's options.
        ranker: ranks completions.
        rollout: generates completions.
        beta: maps an epoch number to beta, which every batch carries.
    """

    def __init__(
        self,
        context: RunContext,
        models: Models,
        aux_coefficient: float | None,
        options: OnlineOptions,
        ranker: Ranker,
        rollout: Rollout,
        beta: Callable[[int], float],
    ) -> None:
        super().__init__(context.method, models, context.phases, aux_coefficient)
        self.options, self.ranker, self.beta, self.run_data = options, ranker, beta, context.data
        self.tokenizer = context.processing_class
        self.sampling = sampling_of(options, models.policy.scorer.model, self.tokenizer)
        self.rollout = rollout
        rollout.attach(models.policy)
        file = context.output_dir / COMPLETIONS if rank() == 0 else None
        table = CompletionTable(file, context.events.handler.callbacks)
        self.log = CompletionLog(table, options.log_completions, options.num_completions_to_log)
        self._epoch = 0
        self.restored()
        # First completions of the initial policy for this rank's prompts of each evaluation set, by the set's key.
        self._starts: dict[str, dict[int, FirstAnswer]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        loss, *others = super().names
        return (loss, *self.ranker.metrics, *self.rollout.metrics, *others)

    @property
    def facts(self) -> list[tuple[str, str]]:
        return [("rollout", self.rollout.describe())]

    def state_dict(self) -> dict[str, Any]:
        """Return the current epoch and the initial policy's completions."""
        starts = {key: [[row, *answer] for row, answer in each.items()] for key, each in self._starts.items()}
        return {"epoch": self._epoch, "starts": starts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self._epoch = state["epoch"]
        self.restored()
        self._starts = {
            key: {row: FirstAnswer(*answer) for row, *answer in answers} for key, answers in state["starts"].items()
        }

    def restored(self) -> None:
        """Begin a new series of names of weights: the same number of steps may now have led to others. Collective."""
        self._series = from_first_rank(uuid.uuid4().hex[:12])

    def redistributed(self, states: Sequence[Any], rank: int) -> Any:
        """Merge the states for a different number of ranks: every rank holds all completions and uses its share."""
        starts: dict[str, dict[int, list[Any]]] = {}
        for state in states:
            for key, answers in state["starts"].items():
                starts.setdefault(key, {}).update({answer[0]: answer for answer in answers})
        return {"epoch": states[0]["epoch"], "starts": {key: list(each.values()) for key, each in starts.items()}}

    def dataset_of(self, data: PreparedData) -> str:
        return ""

    def begin(self, evaluation: Iterable[tuple[WindowPlan, Sequence[AnyBatch], PreparedData]]) -> None:
        """Generate completions for the evaluation sets with the initial policy, as the baseline for win rates."""
        with self.phases.of_evaluation():
            for plan, batches, data in evaluation:
                seeds = window_seeds(self.options.seed, plan, rank(), train=False)
                groups, rankings = self.answered(batches, data, seeds, None, 1)
                scores = (None if ranking.scores is None else ranking.scores[0] for ranking in rankings)
                answers = {group.row: FirstAnswer(group.texts[0], score) for group, score in zip(groups, scores)}
                self._starts[data.key] = answers

    def logged(self, step: int) -> None:
        """Write the newest window's completions, if a table is due."""
        self.log.write(step)

    def finish(self) -> None:
        """Write completions that are waiting for disk space."""
        self.log.table.finish()

    def prepared(
        self, plan: WindowPlan, batches: Sequence[AnyBatch], data: PreparedData, sums: MetricSums, *, train: bool
    ) -> tuple[WindowPlan, Sequence[AnyBatch]]:
        """Generate and rank completions; redistribute the pairs of all ranks."""
        options = self.options
        if train:
            self._epoch = plan.epoch
        beta = self.beta(self._epoch)
        sums.add_once("beta", torch.full((), beta, dtype=torch.float64, device=self.device))
        seeds = window_seeds(options.seed, plan, rank(), train=train)
        groups, rankings = self.answered(batches, data, seeds, sums, options.num_generations)
        self._measure(groups, rankings, sums)
        if train:
            self.log.keep(groups, rankings)
        else:
            self._count_wins(plan, groups, rankings, data, sums)
        own = [pair for pair in map(pair_of, groups, rankings) if pair is not None]
        pairs = sorted((pair for part in gathered(own) for pair in part), key=lambda pair: pair.row)
        return self._batched(pairs, plan, beta, train=train)

    def _batched(
        self, pairs: Sequence[Pair], plan: WindowPlan, beta: float, *, train: bool
    ) -> tuple[WindowPlan, Sequence[AnyBatch]]:
        """Return the plan and this rank's micro-batches of the pairs of all ranks."""
        batch_size = self.options.per_device_train_batch_size if train else self.options.eval_batch_size
        trained = plan_pairs(
            pairs,
            plan,
            world_size=world_size(),
            batch_size=batch_size,
            max_tokens=self.run_data.max_tokens,
            packs=self.models.policy.shares,
        )
        return trained, ranked_batches(pairs, trained, rank(), beta)

    @contextlib.contextmanager
    def rehearsing(self, data: PreparedData) -> Iterator[None]:
        """Let the rollout prepare for a rehearsal."""
        with self.rollout.rehearsing(functools.partial(self._longest, data)):
            yield

    def largest(self, plan: WindowPlan, data: PreparedData, *, train: bool) -> tuple[WindowPlan, Sequence[AnyBatch]]:
        """Generate as many completions at a time as the run will, each as long as it may be, and pair them."""
        options, longest = self.options, functools.partial(self._longest, data)
        with self.phases("rollout"):
            most = options.per_device_train_batch_size * options.gradient_accumulation_steps
            self.rollout.rehearse(longest, most)
        prompt, length = tuple(longest(1).prompts[0]), self.sampling.max_new_tokens
        if train and isinstance(self.ranker, RewardRanker):
            with self.phases("score"):
                for source in self.ranker.rewards.sources:
                    if isinstance(source, ClassifierReward):
                        source.rehearse(len(prompt) + length)
        rows = options.per_device_train_batch_size if train else options.eval_batch_size
        # The completions differ in the first token, so that they share only the prompt.
        pair = Pair(0, prompt, (0,) * length, (1,) * length, None)
        pairs = [pair] * (rows * world_size() * len(plan.micro_batches))
        return self._batched(pairs, plan, self.beta(self._epoch), train=train)

    def _longest(self, data: PreparedData, count: int) -> RolloutRequest:
        """Return a request for completions of the ``count`` longest prompts that only end at their limit."""
        rows = np.argsort(-data.table.prompt, kind="stable")[:count]
        prompts = [data.dataset[int(row)]["prompt_ids"] for row in rows]
        sampling = replace(self.sampling, eos_token_ids=())
        return RolloutRequest(prompts, self.options.num_generations, sampling, self.options.seed)

    def answered(
        self, batches: Sequence[AnyBatch], data: PreparedData, seeds: Seeds, sums: MetricSums | None, count: int
    ) -> tuple[list[Generated], list[Ranking]]:
        """Return this rank's prompts with ``count`` ranked completions each: the phases ``rollout`` and ``score``.

        Collective, also on ranks without prompts.
        """
        own = [batch for batch in batches if isinstance(batch, PromptBatch)]
        rows = [row for batch in own for row in batch.rows]
        prompts = [list(prompt) for batch in own for prompt in batch.prompts]
        with self.phases("rollout") as record:
            request = RolloutRequest(prompts, count, self.sampling, seeds.rollout)
            self.rollout.update(f"{self._series}-{self.models.policy.engine.global_steps}")
            completions = self.rollout.generate(request)
            if sums is not None:
                for name, (total, number) in self.rollout.measured.items():
                    sums.add(name, total, number)
            record.tokens += sum(map(len, prompts)) + sum(len(c.ids) for group in completions for c in group)
        # Random draws of user code are reproducible, and do not affect other random streams.
        with self.phases("score") as record, seeded(seeds.code):
            groups = described(rows, prompts, completions, data, self.tokenizer)
            rankings = self.ranker.rank(groups, further_columns(data), seeds.order, sums)
            record.tokens += sum(len(c.ids) for group in completions for c in group)
        return groups, rankings

    def _measure(self, groups: Sequence[Generated], rankings: Sequence[Ranking], sums: MetricSums) -> None:
        made = [completion for group in groups for completion in group.completions]
        ended = [len(completion.ids) for completion in made if completion.ended]
        sums.add("val/contain_eos_token", len(ended), len(made))
        sums.add("completions/mean_length", sum(len(completion.ids) for completion in made), len(made))
        sums.add("completions/mean_terminated_length", sum(ended), len(ended))
        for reason in REASONS:
            sums.add(f"pairs/{reason}", sum(r.outcome == reason for r in rankings), len(rankings))
        sums.add("pairs/dropped", sum(isinstance(r.outcome, str) for r in rankings), len(rankings))

    def _count_wins(
        self,
        plan: WindowPlan,
        groups: Sequence[Generated],
        rankings: Sequence[Ranking],
        data: PreparedData,
        sums: MetricSums,
    ) -> None:
        """Compute the win rate of the policy's first completion over the initial policy's; ties count half."""
        if data.key not in self._starts:
            return
        seeds = window_seeds(self.options.seed, plan, rank(), train=False)
        with self.phases("score"), seeded(seeds.code):
            starts = [self._starts[data.key][group.row] for group in groups]
            points = self.ranker.wins(groups, rankings, starts, seeds.order)
        known = [point for point in points if point is not None]
        sums.add("win_rate", sum(known), len(known))
