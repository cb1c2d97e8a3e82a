"""One window: a pass without gradients, a pass over the micro-batches, one reduction; for training and evaluation."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alignment.checkpoint.run_state import StatefulFields
from alignment.data.batching import AnyBatch, MicroBatches
from alignment.data.transfer import OnDevice
from alignment.data.windows import WindowCounts, WindowPlan
from alignment.engines.collectives import gathered, sum_over_ranks
from alignment.engines.phases import Phases
from alignment.engines.rng import rewinder
from alignment.engines.scoring import PolicyEngine
from alignment.reporting.metrics import MetricSums
from alignment.reporting.progress import Progress, Watched
from alignment.run.ranks import rank, tell
from alignment.training.bad_steps import BadStep
from alignment.training.data import PreparedData
from alignment.training.method import AnyMethod, Items, Models, Window
from alignment.training.safe_points import SafePoint

_Rows = tuple[tuple[int, ...], Tensor]  # the rows of a micro-batch, and the loss of each


@dataclass
class ReferencePasses(StatefulFields):
    """The number of micro-batches in a forward pass of a reference whose weights are gathered for each.

    It decides how log-probs are rounded, so that a resumed run keeps it.
    """

    together: int = 1

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the number."""
        super().load_state_dict(state)
        tell(self.describe())

    def describe(self) -> str | None:
        """Return a line for a run with more than one."""
        return f"reference: {self.together} micro-batches in a forward pass" if self.together > 1 else None


class WindowResult(NamedTuple):
    """What a window gave.

    Attributes:
        items: ``{name: (sum, count)}`` over all ranks, equal on all.
        counts: of what was trained on.
    """

    items: Items
    counts: WindowCounts


class WindowPass:
    """Computes windows of one method with one set of models.

    Args:
        method: the method.
        models: its models.
        phases: records time and memory.
        aux_coefficient: weight of the load-balancing loss of a mixture of experts, or None.
    """

    def __init__(self, method: AnyMethod, models: Models, phases: Phases, aux_coefficient: float | None) -> None:
        self.method, self.models, self.phases, self.aux_coefficient = method, models, phases, aux_coefficient
        # The micro-batch that ran out of memory: its number of rows, and the number of tokens of each sequence.
        self.failed: tuple[int, tuple[int, ...]] = (0, ())
        self.passes = ReferencePasses()
        self._safe_point = SafePoint()
        self._again: Callable[[], None] | None = None

    @property
    def device(self) -> torch.device:
        """The policy's device."""
        return self.models.policy.device

    @property
    def names(self) -> tuple[str, ...]:
        """The names of a window's metrics."""
        return ("loss", *self.method.metrics, *(() if self.aux_coefficient is None else ("aux_loss",)))

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Facts for the run's report about how windows were computed, as (name, value) pairs."""
        return []

    def dataset_of(self, data: PreparedData) -> str:
        """Return the name that identifies the dataset of row ids; ``""`` if batches contain generated completions."""
        return data.key

    def begin(self, evaluation: Iterable[tuple[WindowPlan, Sequence[AnyBatch], PreparedData]]) -> None:
        """Called before the first step with the windows of the evaluation sets; collective."""

    def logged(self, step: int) -> None:
        """Called after the log of a step."""

    def restored(self) -> None:
        """Called after the policy's weights were replaced, other than by a step; collective."""

    def finish(self) -> None:
        """Called at the end of a run on the first rank, to flush pending output."""

    def prepared(
        self, plan: WindowPlan, batches: Sequence[AnyBatch], data: PreparedData, sums: MetricSums, *, train: bool
    ) -> tuple[WindowPlan, Sequence[AnyBatch]]:
        """Return the plan, batches and data of the passes; a method that generates its own rows replaces them here."""
        return plan, batches

    def __call__(
        self,
        plan: WindowPlan,
        batches: Sequence[AnyBatch],
        data: PreparedData,
        *,
        train: bool,
        between: Callable[[], None] = lambda: None,
        progress: Progress | None = None,
        rehearses: bool = False,
    ) -> WindowResult:
        """Compute losses and metrics of the window; with ``train``, leave its gradient in the engine, not yet applied.

        Args:
            plan: the window.
            batches: this rank's micro-batches of it.
            data: the dataset of the window's rows.
            train: accumulate gradients; the policy must be a :class:`PolicyEngine`.
            between: called after the backward pass of each micro-batch except the last.
            progress: advances with each micro-batch that is trained on or evaluated, not with those of prompts.
            rehearses: compute the largest micro-batches of a run, see :meth:`largest`, instead of ``batches``.

        Raises:
            BadStep: if the loss is not finite in training; on every rank, before any weight has changed.
            Cut: if the run was asked to stop; on every rank, before any weight has changed.
        """
        with contextlib.nullcontext() if train else self.phases.of_evaluation():
            sums = MetricSums(self.names, self.device, first_rank=rank() == 0)
            if rehearses:
                plan, batches = self.largest(plan, data, train=train)
            else:
                plan, batches = self.prepared(plan, batches, data, sums, train=train)
            if progress is not None:
                batches = progress.watch(batches, self.method.passes)
            watched = Watched(batches, self._safe_point)
            try:
                together = self._together(train)
                window = Window(
                    watched, plan.counts, self.models, sums, self.phases, self.dataset_of(data), together, rehearses
                )
                known = self.method.before_training(window)
                losses: list[_Rows] = []
                self._again = None
                if train and self._engine.scales_loss:
                    self._again = functools.partial(self._repeat, rewinder(), known, window)
                with self.phases("train" if train else "evaluate") as record:
                    if train:
                        record.tokens += self._accumulate(known, window, losses, between)
                    else:
                        record.tokens += self._evaluate(known, window, losses)
                    sum_over_ranks(sums.values)
            except torch.OutOfMemoryError:
                if (newest := watched.newest) is not None:
                    self.failed = len(newest.rows), self.method.scored(newest).sizes
                raise
        items = sums.items()
        if train and not math.isfinite(items["loss"][0]):
            raise _non_finite(items["loss"][0], losses, data.sources)
        return WindowResult(items, plan.counts)

    def _together(self, train: bool) -> int:
        """Return the number of micro-batches in a forward pass of the reference, by their rows in an evaluation."""
        found, options = self.passes.together, self.method.options
        return found if train else max(1, found * options.per_device_train_batch_size // options.eval_batch_size)

    def largest(self, plan: WindowPlan, data: PreparedData, *, train: bool) -> tuple[WindowPlan, Sequence[AnyBatch]]:
        """Return plan and batches to rehearse; a method that generates its own rows replaces them by its limits."""
        return plan, MicroBatches(self.method.kind.collate, data.batched, plan, rank())

    @contextlib.contextmanager
    def rehearsing(self, data: PreparedData) -> Iterator[None]:
        """Wrap a rehearsal; afterwards, everything is as before."""
        yield

    @property
    def _engine(self) -> PolicyEngine:
        policy = self.models.policy
        assert isinstance(policy, PolicyEngine), "only a training engine has gradients"
        return policy

    def _accumulate(self, known: Any, window: Window[Any], losses: list[_Rows], between: Callable[[], None]) -> int:
        """Accumulate the window's gradient in the engine; return the number of tokens of its sequences."""
        tokens, count = 0, len(window.batches)
        for index, batch in enumerate(window.batches):
            self._engine.backward(self._micro_batch(batch, index, known, window, losses), last=index == count - 1)
            tokens += self.method.scored(batch).tokens
            if index < count - 1:
                between()
        return tokens

    def _evaluate(self, known: Any, window: Window[Any], losses: list[_Rows]) -> int:
        """Compute the window's loss without a gradient; return the number of tokens of its sequences."""
        tokens = 0
        for index, batch in enumerate(window.batches):
            with self.models.policy.inference():
                self._micro_batch(batch, index, known, window, losses)
            tokens += self.method.scored(batch).tokens
        return tokens

    def repeat(self) -> None:
        """Recompute the gradient of the newest window, for another loss scale, and nothing else.

        Generated completions, reference log-probs and random streams are those of the first computation.

        Raises:
            Cut: if the run was asked to stop; on every rank, before any weight has changed.
        """
        assert self._again is not None, "only an fp16 policy's newest training window can be repeated"
        self._again()

    def _repeat(self, rewind: Callable[[], None], known: Any, window: Window[Any]) -> None:
        rewind()
        with self.phases("train"):
            self._accumulate(known, window, [], lambda: None)

    def _micro_batch(
        self, batch: AnyBatch, index: int, known: Any, window: Window[Any], losses: list[_Rows]
    ) -> Tensor:
        """Compute the loss of one micro-batch, and add its metrics to the window's."""
        policy = self.models.policy
        if isinstance(batch, OnDevice):
            batch = policy.placed(batch, self.method.untrained)
        scored = self.method.scored(batch)
        output = policy.forward(scored, stats=True, tokens=self.method.needs_tokens)
        result = self.method.losses(batch, index, output, known, window)
        local = result.local
        if self.aux_coefficient is not None:
            # A product of batch means has no exact sum over micro-batches, so each is weighted by its share of tokens.
            share = output.aux_loss * (scored.tokens / window.counts.sequence_tokens)
            local = local + self.aux_coefficient * share
            window.sums.add_part("aux_loss", share)
        window.sums.add_part("loss", local)
        losses.append((batch.rows, result.rows))
        return local


def _non_finite(loss: float, losses: list[_Rows], sources: Callable[[Iterable[int]], list[Any]]) -> BadStep:
    own = [row for rows, values in losses for row, value in zip(rows, values.tolist()) if not math.isfinite(value)]
    rows = sorted(sources({row for part in gathered(own) for row in part}))
    return BadStep(
        f"the loss of this window is {loss}; no update was made. Rows with a non-finite loss: "
        f"{', '.join(map(str, rows[:16])) or 'none, so the NLL or the balancing loss overflowed'}. Likely causes: "
        "weights that are already corrupted, a learning_rate that is too high, fp16 (use bf16), or too large a beta",
        "non-finite loss",
    )
