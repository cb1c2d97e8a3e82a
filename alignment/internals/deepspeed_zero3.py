"""DeepSpeed's ZeRO-3: where a partitioned weight is, and the module-level state that an engine leaves behind.

Seen with DeepSpeed 0.19.8, all of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether a parameter is one of ZeRO-3's, whole or not at the moment.

    ``deepspeed.zero.GatheredParameters`` fails on any other, and takes ``enabled`` for that reason. The mark is the
    attribute that ``deepspeed.zero.Init`` sets first; transformers goes by it as well.
    """
    return hasattr(parameter, "ds_id")


def away(module: nn.Module) -> list[Any]:
    """The parameters of which this rank has only its share at the moment; none of them where ZeRO-3 has no part."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return [p for p in module.parameters() if getattr(p, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE]


def whole_bytes(parameter: Any) -> int:
    """The size of a partitioned parameter when it is gathered; its own ``numel()`` is that of an empty tensor."""
    return int(parameter.ds_numel * parameter.element_size())


def settle(engine: Any, module: nn.Module) -> None:
    """Wait for what an earlier pass fetched ahead and did not use, and let go of it.

    A weight in flight cannot be divided (DeepSpeed fails an assertion), and is not whole yet. The engine's own passes
    begin with the same call; whoever uses the weights beside them has to make it.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if any(getattr(p, "ds_status", None) == ZeroParamStatus.INFLIGHT for p in module.parameters()):
        _coordinator(engine).reset_step()


def divide_again(module: nn.Module) -> None:
    """Divide every partitioned parameter that is still whole, but for the small ones that DeepSpeed keeps whole.

    An earlier pass keeps what it expects to use soon, one that raised keeps all; DeepSpeed offers to release the
    weights of one module after its own forward only.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    parameter: Any  # mypy knows nothing of what ZeRO-3 adds to one
    for parameter in module.parameters():
        parameter.ds_active_sub_modules.clear()
        if parameter.ds_status == ZeroParamStatus.AVAILABLE and not parameter.ds_persist:
            parameter.partition()


@contextlib.contextmanager
def announced_passes(engine: Any, module: nn.Module) -> Iterator[None]:
    """Within this context a forward of ``module``, called without its engine, is a pass of its own.

    The engine's own forward announces each pass; without that, DeepSpeed never learns the order of the modules and
    fetches no weight ahead of its use.
    """
    coordinator = _coordinator(engine)
    announce = module.register_forward_pre_hook(lambda *_: coordinator.reset_step(), prepend=True)
    try:
        yield
    finally:
        announce.remove()


def is_deepspeed_hook(hook: Any) -> bool:
    """Whether a hook of a module is one of DeepSpeed's, which gather weights and divide them again.

    While weights are gathered for many forwards, the hooks would divide each module's after its first use.
    ``deepspeed.zero.unwrap_model_for_generation`` removes them and makes new ones afterwards, which then run after
    everyone else's.
    """
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "deepspeed"


@contextlib.contextmanager
def balanced_module_stack() -> Iterator[None]:
    """Around a backward pass: forget the modules that were entered within this context and not left.

    A recomputation of activations (``use_reentrant=False``) stops early, as soon as it has what it needs, and the hook
    that takes the last module off DeepSpeed's stack is never called: the stack grows with every step.
    """
    stack = _module_stack()
    depth = len(stack)
    try:
        yield
    finally:
        del stack[depth:]


def forget_partitioned(module: nn.Module) -> None:
    """Remove what DeepSpeed's module-level state holds of ``module`` and its engine.

    ``destroy`` leaves two references that keep an engine alive for ever: without this, every engine of a process would
    stay in memory, its weights, masters and optimizer states with it. Both places are looked up with care, so that a
    release that fixes them changes nothing here.
    """
    # The stack of modules in forward: the outermost one is pushed when hooks are set up, and never popped.
    stack = _module_stack()
    own = set(module.modules())
    stack[:] = [entry for entry in stack if entry not in own]
    forget_release_plans()


def forget_leaf(module: nn.Module) -> None:
    """Let the parameters of a module that was a leaf module be like any others.

    Its engine has written into each of them which leaf they belong to. Taking the flag from the module leaves that,
    and an engine that trains them later would wait for the whole leaf before it reduces a gradient. Seen with
    DeepSpeed 0.19.8.
    """
    for parameter in module.parameters():
        vars(parameter).pop("ds_z3_leaf_module", None)


def forget_release_plans() -> None:
    """Clear what ZeRO-3 remembers of which weights to let go of after which module.

    A cache on a method, which has the coordinator among its keys but not the order of modules that it was made for.
    The next forward fills it again.
    """
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    for name, function in vars(PartitionedParameterCoordinator).items():
        if name.endswith("__params_to_release"):
            _clear_cache(function)


def _clear_cache(function: Any) -> None:
    """Clear an ``lru_cache``, also from behind the closures of decorators."""
    if hasattr(function, "cache_clear"):
        function.cache_clear()
    for cell in getattr(function, "__closure__", None) or ():
        _clear_cache(cell.cell_contents)


def _module_stack() -> list[nn.Module]:
    """The modules that ZeRO-3's hooks believe to be in forward, the innermost last."""
    from deepspeed.runtime.zero import parameter_offload

    stack: list[nn.Module] = getattr(parameter_offload, "FWD_MODULE_STACK", [])
    return stack


def _coordinator(engine: Any) -> Any:
    """What gathers and releases weights: of the optimizer, or of what stands in its place in a frozen engine."""
    optimizer = engine.optimizer
    return getattr(optimizer, "parameter_offload", optimizer).get_param_coordinator()
