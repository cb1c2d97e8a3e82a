"""Compute the largest micro-batches of a run before its first step, so that it runs out of memory there or never."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from alignment.config.errors import TrainingError
from alignment.data.windows import WindowPlan, micro_tokens
from alignment.engines.optimizers import bytes_to_come
from alignment.engines.rng import preserved
from alignment.internals.deepspeed_state import state_units
from alignment.reporting.progress import say
from alignment.run.activity import ACTIVITY
from alignment.run.ranks import world_size
from alignment.run.stop import Cut
from alignment.training.bad_steps import BadStep
from alignment.training.context import RunContext
from alignment.training.data import PreparedData
from alignment.training.evaluation import evaluation_windows
from alignment.training.out_of_memory import out_of_memory
from alignment.training.run_engines import RunEngines

_MASTER = 4  # bytes per element of the copy of the gradients in fp32, from which an update is made


class Rehearsal:
    """Computes the largest micro-batch, rollout, batch of a reward model and evaluation batch, with completions that
    an evaluation samples, and allocates the memory of an optimizer step.

    Nothing of it remains: neither gradients, counters and loss scale of the engine, nor random states, times and
    metrics. Reward functions and judges are not called, and nothing is saved. With ``auto_find_batch_size``,
    micro-batches are made smaller until everything fits: on a single rank by trial; on several, of which one may fail
    while others wait for it, as the memory plan says. Their limit is part of the run state.

    Args:
        context: the run.
        engines: its engines.
        data: the training data.
    """

    def __init__(self, context: RunContext, engines: RunEngines, data: PreparedData) -> None:
        self.context, self.engines, self.data = context, engines, data
        context.run_state.register("split", self)

    def state_dict(self) -> dict[str, Any]:
        """Return the limit of micro-batches."""
        return {"max_tokens": self.context.data.max_tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the limit that ``auto_find_batch_size`` found; without it, the options set the limit."""
        if self.context.args.auto_find_batch_size:
            self.context.data.limit(state["max_tokens"])

    def __call__(self, steps: int) -> None:
        """Rehearse the next ``steps`` steps, unless the options say otherwise; collective.

        Raises:
            TrainingError: on a rank that is out of memory.
            Cut: if the run was asked to stop; on every rank.
        """
        args, context = self.context.args, self.context
        on_gpu = self.engines.window_pass.device.type == "cuda"
        if steps < 1 or args.memory_rehearsal == "false" or (args.memory_rehearsal == "auto" and not on_gpu):
            return
        before = context.data.max_tokens
        if args.auto_find_batch_size and before is None and world_size() > 1 and context.memory_plan is not None:
            context.data.limit(context.memory_plan.max_tokens)
        with ACTIVITY("rehearsal"), self._as_before(), self.engines.window_pass.rehearsing(self.data):
            while (failure := self._attempt(steps)) is not None:
                self._split(failure)
        if context.data.max_tokens != before:
            say(f"auto_find_batch_size: micro-batches of at most {context.data.max_tokens} tokens fit in memory")

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        """Restore what a rehearsal changes, other than gradients: random states, counters, times, and buffers."""
        engine, phases = self.context.run_state.parts["engine"], self.context.phases
        counters, records = engine.state_dict(), phases.state_dict()
        # Such as the table of a rotary embedding that follows the longest sequence so far.
        modules = list(self.engines.policy.scorer.modules())
        buffers = [(m, name, each, each.clone()) for m in modules for name, each in m.named_buffers(recurse=False)]
        lengths = [(m, m.max_seq_len_cached) for m in modules if hasattr(m, "max_seq_len_cached")]
        try:
            with preserved():
                yield
        finally:
            engine.load_state_dict(counters)
            phases.load_state_dict(records)
            for module, name, buffer, content in buffers:
                if getattr(module, name) is not buffer or not torch.equal(buffer, content):
                    setattr(module, name, buffer.copy_(content))
            for module, length in lengths:
                module.max_seq_len_cached = length

    def _attempt(self, steps: int) -> TrainingError | None:
        """Compute everything once; return the error if it does not fit."""
        window_pass, failure = self.engines.window_pass, None
        window_pass.failed = (0, ())
        try:
            self._compute(steps)
        except torch.OutOfMemoryError as error:
            failure = out_of_memory(
                self.context, window_pass.failed[1], error, "in the rehearsal before the first step"
            )
            if world_size() > 1:
                raise failure from error  # the other ranks still compute
        except Cut:
            self._undo()
            raise
        # Only now, as the traceback holds the tensors of the failed pass.
        if failure is not None:
            gc.collect()
            get_accelerator().empty_cache()
            self._undo()
        return failure

    def _compute(self, steps: int) -> None:
        """Compute the largest micro-batches and allocate the memory of a step."""
        policy, run, window_pass = self.engines.policy, self.context.data, self.engines.window_pass
        assert run.sampler is not None
        with self.context.phases("step"):  # the optimizer's states, which are there from the first step on
            states = self._block(bytes_to_come(policy.engine, policy.device))
        with contextlib.suppress(BadStep):  # of values that the run may skip
            window_pass(run.sampler.largest(steps), (), self.data, train=True, rehearses=True)
        with self.context.phases("step"):
            masters = [unit.master for unit in state_units(policy.engine)]
            self._block(_MASTER * sum(each.numel() for each in masters if each.device.type == policy.device.type))
        self._undo()
        if self.context.args.eval_strategy != "no" or self.context.args.eval_on_start:
            sets = [(whole, data) for whole, _, data in evaluation_windows(self.context)]
            parts = [(data, whole, micro) for whole, data in sets for micro in range(len(whole.micro_batches))]
            data, whole, micro = max(parts, key=lambda each: micro_tokens(each[0].table, each[1], each[2], run.packs))
            window_pass(WindowPlan.of([(whole, micro)]), (), data, train=False, rehearses=True)
            if self.context.answers is not None:
                self.context.answers.rehearse(window_pass.models)
        del states

    def _block(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.engines.policy.device)

    def _undo(self) -> None:
        """Discard gradients, and release gathered weights."""
        models = self.engines.window_pass.models
        self.engines.policy.discard()
        for engine in (models.policy, getattr(models.reference, "engine", None)):
            if engine is not None:
                engine.release()

    def _split(self, failure: TrainingError) -> None:
        """Halve the limit of micro-batches, or raise ``failure`` if a smaller one does not help."""
        (rows, lengths), asked = self.engines.window_pass.failed, self.context.args.auto_find_batch_size
        tokens = sum(lengths) if self.context.data.packs else max(lengths, default=0) * len(lengths)
        smaller = tokens // 2 < (self.context.data.max_tokens or math.inf)
        if not asked or world_size() > 1 or rows < 2 or not smaller:  # no rows: in a rollout or an optimizer step
            raise failure
        self.context.data.limit(tokens // 2)
