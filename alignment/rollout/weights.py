"""The weights during a rollout under ZeRO-3: gathered once for all tokens, or layer by layer for every token.

Gathering alone is not sufficient: DeepSpeed's forward hooks would partition each module's weights again after its
first use. The hooks are therefore removed and later restored, as the same objects in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import deepspeed

from alignment.engines.scoring import ScoringEngine
from alignment.internals.deepspeed_zero3 import (
    announced_passes,
    away,
    balanced_module_stack,
    divide_again,
    forget_release_plans,
    is_deepspeed_hook,
    settle,
    whole_bytes,
)
from alignment.internals.torch import without_forward_hooks

# Bytes gathered per call, which first copies this rank's share of an offloaded weight to the device.
_BYTES_AT_ONCE = 2**28


@contextlib.contextmanager
def whole_weights(policy: ScoringEngine) -> Iterator[None]:
    """Gather all weights on every rank and remove DeepSpeed's hooks; undo both on any exit. Collective."""
    settle(policy.engine, policy.scorer)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_forward_hooks(policy.scorer, is_deepspeed_hook))
            for group in _groups(away(policy.scorer)):
                stack.enter_context(deepspeed.zero.GatheredParameters(group))
            yield
    finally:
        divide_again(policy.scorer)


@contextlib.contextmanager
def weights_by_layer(policy: ScoringEngine) -> Iterator[None]:
    """Let DeepSpeed gather and release weights around every forward of ``scorer.model``, as for an ordinary pass.

    Every rank must make the same number of forward passes.
    """
    settle(policy.engine, policy.scorer)
    forget_release_plans()  # they belong to another order of modules
    try:
        with announced_passes(policy.engine, policy.scorer.model), balanced_module_stack():
            yield
    finally:
        settle(policy.engine, policy.scorer)
        divide_again(policy.scorer)
        forget_release_plans()


def _groups(parameters: list[Any]) -> Iterator[list[Any]]:
    """Group consecutive parameters of about ``_BYTES_AT_ONCE`` in total."""
    group: list[Any] = []
    size = 0
    for parameter in parameters:
        group.append(parameter)
        size += whole_bytes(parameter)
        if size >= _BYTES_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group
