"""The cheapest changes with which a run fits in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from alignment.config.options import AlignmentConfig
from alignment.config.options_online import OnlineOptions
from alignment.planning.plan import MemoryPlan

NUMBER = 3
_LEAST_SHARE = 0.3  # of a GPU, for a colocated vLLM server


@dataclass(frozen=True)
class Change:
    """Options to change together.

    Attributes:
        options: values by option.
        preserves: whether the run computes the same updates, apart from rounding.
        costs: what it costs.
    """

    options: Mapping[str, Any]
    preserves: bool
    costs: str

    def describe(self) -> str:
        """Return a line with the options as arguments of the command line."""
        given = " ".join(
            f"--{name} {str(value).lower() if isinstance(value, bool) else value}"
            for name, value in self.options.items()
        )
        return f"{given}  ({'same result' if self.preserves else 'another result'}; {self.costs})"

    def then(self, other: Change) -> Change:
        """Return both changes as one."""
        costs = ", ".join(filter(None, (self.costs, other.costs)))
        return Change({**self.options, **other.options}, self.preserves and other.preserves, costs)


def possible(options: AlignmentConfig, stage: int, ranks: int, adapters: bool) -> Iterator[Change]:
    """Yield single changes that take less memory: those that preserve the result first, cheap ones first."""
    rows = options.per_device_train_batch_size
    if isinstance(options, OnlineOptions) and options.rollout_backend == "vllm":
        if options.vllm_mode == "colocate" and (options.vllm_gpu_memory_utilization or 1) > _LEAST_SHARE:
            yield Change({"vllm_gpu_memory_utilization": _LEAST_SHARE}, True, "fewer completions at a time")
    elif isinstance(options, OnlineOptions) and options.rollout_batch_size != 1:
        yield Change({"rollout_batch_size": 1}, True, "slower rollouts")
    recomputing = {} if options.gradient_checkpointing else {"gradient_checkpointing": True}
    if recomputing:
        yield Change(recomputing, True, "a third more computation")
    if not options.activation_offloading:
        moving = {"activation_offloading": True, **recomputing}
        yield Change(moving, True, "hidden states are copied to host memory and back")
    if options.tiled_mlp is not True:
        yield Change({"tiled_mlp": True}, True, "MLPs are computed in slices of the sequence")
    if rows > 1:
        steps = options.gradient_accumulation_steps * rows
        fewer = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": steps}
        yield Change(fewer, True, "smaller micro-batches")
    if not adapters:
        if ranks > 1 and stage < 3:
            yield Change({"deepspeed": "zero3"}, True, "weights are gathered in each pass")
        yield Change({"deepspeed": "zero2_offload"}, True, "the optimizer runs in host memory")
        yield Change({"deepspeed": "zero3_offload"}, True, "weights are copied from host memory in each pass")
    elif ranks > 1 and stage < 3:
        yield Change({"deepspeed": "zero3"}, True, "weights are gathered in each pass")
    if options.ref_placement in ("replica", "sharded"):
        yield Change({"ref_placement": "offload"}, True, "the reference is copied from host memory in each pass")
    if isinstance(options, OnlineOptions) and options.reward_placement in ("replica", "sharded"):
        yield Change({"reward_placement": "offload"}, True, "the reward model is copied from host memory in each pass")
    if not adapters:
        yield Change({"optim": "adamw_8bit"}, False, "8-bit optimizer states")
        yield Change({"use_peft": True}, False, "LoRA instead of all weights")
        yield Change({"use_peft": True, "load_in_4bit": True}, False, "QLoRA instead of all weights")
    elif not (options.load_in_4bit or options.load_in_8bit):
        yield Change({"load_in_4bit": True}, False, "4-bit base weights")


def sufficient(
    changes: list[Change],
    planned: Callable[[Change], MemoryPlan | None],
    fits: Callable[[MemoryPlan], bool],
    longest: Callable[[Change], int],
) -> list[Change]:
    """Return up to three changes, each of which is sufficient; several together if no single one is.

    Args:
        changes: single changes, cheap ones first.
        planned: the plan with a change; None if the options contradict each other.
        fits: whether a plan fits.
        longest: the longest sequences that fit with a change; 0 if none do.
    """
    found = [change for change in changes if _works(change, planned, fits)][:NUMBER]
    if found:
        return found
    base, together = planned(Change({}, True, "")), None
    best = math.inf if base is None else base.peak()
    for change in changes:
        candidate = change if together is None else together.then(change)
        plan = planned(candidate)
        if plan is None:
            continue
        if fits(plan):
            return [candidate]
        if plan.peak() < best:
            best, together = plan.peak(), candidate
    candidate = Change({}, True, "") if together is None else together
    tokens = longest(candidate)
    return [candidate.then(Change({"max_length": tokens}, False, "shorter sequences"))] if tokens else []


def _works(change: Change, planned: Callable[[Change], MemoryPlan | None], fits: Callable[[MemoryPlan], bool]) -> bool:
    plan = planned(change)
    return plan is not None and fits(plan)
