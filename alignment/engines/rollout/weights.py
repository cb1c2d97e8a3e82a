"""The weights during a rollout under ZeRO-3: gathered once for all tokens, or layer by layer at every token.

Gathering alone does not help: DeepSpeed's forward hooks would divide each module's weights again after its first use.
The hooks are therefore put aside with their very objects, and put back in their order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import deepspeed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from alignment.engines.release import balanced_module_stack, forget_release_plans
from alignment.engines.scoring import ScoringEngine

# Bytes gathered by one call: it first copies this rank's share of an offloaded weight to the device.
_BYTES_AT_ONCE = 2**28


@contextlib.contextmanager
def whole_weights(policy: ScoringEngine) -> Iterator[None]:
    """Every weight whole on every rank and no hooks of DeepSpeed's; divided and hooked on any exit. Collective."""
    _settle(policy)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_without_hooks(policy.scorer))
            for group in _groups(away(policy.scorer)):
                stack.enter_context(deepspeed.zero.GatheredParameters(group))
            yield
    finally:
        _release(policy.scorer)


@contextlib.contextmanager
def weights_by_layer(policy: ScoringEngine) -> Iterator[None]:
    """DeepSpeed gathers and releases weights around every forward of ``scorer.model``, as for a whole pass.

    Every rank must make equally many forwards.
    """
    _settle(policy)
    coordinator = _coordinator(policy)
    # The engine's own forward announces each pass; without that, DeepSpeed never learns the order of the modules and
    # fetches no weight ahead of its use.
    announce = policy.scorer.model.register_forward_pre_hook(lambda *_: coordinator.reset_step(), prepend=True)
    forget_release_plans()  # of another order of modules
    try:
        with balanced_module_stack():
            yield
    finally:
        announce.remove()
        _settle(policy)
        _release(policy.scorer)
        forget_release_plans()


def away(module: nn.Module) -> list[Any]:
    """The parameters of which this rank has only its share at the moment."""
    return [
        parameter
        for parameter in module.parameters()
        if getattr(parameter, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE
    ]


def _coordinator(policy: ScoringEngine) -> Any:
    optimizer = policy.engine.optimizer
    return getattr(optimizer, "parameter_offload", optimizer).get_param_coordinator()


def _settle(policy: ScoringEngine) -> None:
    """Wait for what an earlier pass fetched ahead and did not use, and let go of it."""
    if any(getattr(p, "ds_status", None) == ZeroParamStatus.INFLIGHT for p in policy.scorer.parameters()):
        _coordinator(policy).reset_step()


def _release(module: nn.Module) -> None:
    """Divide what is still whole: an earlier pass keeps what it expects to use soon, one that raised keeps all."""
    parameter: Any  # mypy knows nothing of what ZeRO-3 adds to one
    for parameter in module.parameters():
        parameter.ds_active_sub_modules.clear()
        if parameter.ds_status == ZeroParamStatus.AVAILABLE and not parameter.ds_persist:
            parameter.partition()


def _groups(parameters: list[Any]) -> Iterator[list[Any]]:
    """Consecutive parameters of about ``_BYTES_AT_ONCE`` together."""
    group: list[Any] = []
    size = 0
    for parameter in parameters:
        group.append(parameter)
        size += parameter.ds_numel * parameter.element_size()
        if size >= _BYTES_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


@contextlib.contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Put DeepSpeed's forward hooks aside; other hooks stay, and all keep their order."""
    put_aside: list[tuple[dict[int, Any], dict[int, Any]]] = []
    try:
        for part in module.modules():
            for hooks in (part._forward_pre_hooks, part._forward_hooks):
                put_aside.append((hooks, dict(hooks)))
                for key in [key for key, hook in hooks.items() if _is_deepspeeds(hook)]:
                    del hooks[key]
        yield
    finally:
        for hooks, before in put_aside:
            hooks.clear()
            hooks.update(before)


def _is_deepspeeds(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "deepspeed"
