"""DeepSpeed's ZeRO-3: the state of partitioned weights, and the module-level state that an engine leaves behind.

Seen with DeepSpeed 0.19.8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from torch import nn


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether a parameter belongs to ZeRO-3, whether or not it is gathered at the moment.

    ``deepspeed.zero.GatheredParameters`` fails on any other parameter, hence its argument ``enabled``. The mark is the
    attribute that ``deepspeed.zero.Init`` sets first; transformers uses it as well.
    """
    return hasattr(parameter, "ds_id")


def away(module: nn.Module) -> list[Any]:
    """The parameters that are partitioned at the moment; empty without ZeRO-3."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return [p for p in module.parameters() if getattr(p, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE]


def whole_bytes(parameter: Any) -> int:
    """The size of a partitioned parameter when gathered; its own ``numel()`` is that of an empty tensor."""
    return int(parameter.ds_numel * parameter.element_size())


def settle(engine: Any, module: nn.Module) -> None:
    """Wait for weights that an earlier pass prefetched and did not use, and release them.

    A weight in flight cannot be partitioned (DeepSpeed fails an assertion), and is not gathered yet. The engine's own
    passes begin with the same call; any other use of the weights has to make it.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if any(getattr(p, "ds_status", None) == ZeroParamStatus.INFLIGHT for p in module.parameters()):
        _coordinator(engine).reset_step()


def divide_again(module: nn.Module) -> None:
    """Partition every gathered parameter again, except for the small ones that DeepSpeed keeps gathered.

    An earlier pass keeps what it expects to use soon, and one that raised keeps everything; DeepSpeed can release the
    weights of a module only after its own forward.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    parameter: Any  # mypy does not know the attributes that ZeRO-3 adds
    for parameter in module.parameters():
        parameter.ds_active_sub_modules.clear()
        if parameter.ds_status == ZeroParamStatus.AVAILABLE and not parameter.ds_persist:
            parameter.partition()


@contextlib.contextmanager
def announced_passes(engine: Any, module: nn.Module) -> Iterator[None]:
    """Treat a forward of ``module`` without its engine as a separate pass within this context.

    The engine's own forward announces each pass; otherwise DeepSpeed never learns the order of the modules and
    prefetches nothing.
    """
    coordinator = _coordinator(engine)
    announce = module.register_forward_pre_hook(lambda *_: coordinator.reset_step(), prepend=True)
    try:
        yield
    finally:
        announce.remove()


def is_deepspeed_hook(hook: Any) -> bool:
    """Whether a module's hook is one of DeepSpeed's, which gather weights and partition them again.

    While weights are gathered for many forward passes, the hooks would partition each module's weights after their
    first use. ``deepspeed.zero.unwrap_model_for_generation`` removes them and creates new ones afterwards, which then
    run after all other hooks.
    """
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "deepspeed"


@contextlib.contextmanager
def balanced_module_stack() -> Iterator[None]:
    """Remove, after a backward pass, the modules that were entered within this context and not left.

    A recomputation of activations (``use_reentrant=False``) stops as soon as it has what it needs, so that the hook
    that pops the last module off DeepSpeed's stack is never called: the stack would grow with every step.
    """
    stack = _module_stack()
    depth = len(stack)
    try:
        yield
    finally:
        del stack[depth:]


def forget_partitioned(module: nn.Module) -> None:
    """Remove the references of DeepSpeed's module-level state to ``module`` and its engine.

    ``destroy`` leaves two references that keep an engine alive forever: without this function, every engine of a
    process would stay in memory, with its weights, master weights and optimizer states. Both are looked up
    defensively, so that nothing changes with a release that fixes them.
    """
    # The stack of active modules: the outermost one is pushed when hooks are set up, and never popped.
    stack = _module_stack()
    own = set(module.modules())
    stack[:] = [entry for entry in stack if entry not in own]
    forget_release_plans()


def forget_leaf(module: nn.Module) -> None:
    """Reset the parameters of a former leaf module to ordinary parameters.

    Its engine has marked each of them with their leaf. Removing the flag from the module does not remove the marks,
    and an engine that trains them later would wait for the entire leaf before it reduces a gradient. Seen with
    DeepSpeed 0.19.8.
    """
    for parameter in module.parameters():
        vars(parameter).pop("ds_z3_leaf_module", None)


@contextlib.contextmanager
def reduced_by_parameter(chosen: Callable[[nn.Module], bool]) -> Iterator[None]:
    """Let engines that are created within this context reduce gradients of chosen leaf modules one by one.

    They otherwise do so in a backward hook of the leaf, which is called before there are gradients if its input
    requires none. Seen with DeepSpeed 0.19.8.
    """
    from deepspeed.runtime.zero import stage3

    belongs = stage3.z3_leaf_parameter

    def excluded(parameter: Any) -> bool:
        return belongs(parameter) and not chosen(parameter.ds_z3_leaf_module)

    with mock.patch.object(stage3, "z3_leaf_parameter", excluded):
        yield


def forget_order(engine: Any) -> None:
    """Let the engine learn the order of its modules again, from its next pass.

    DeepSpeed keeps an order as long as passes begin like it. After two different passes in a row, without the engine's
    own forward in between, every later pass would end with fetching the first layers of a second one, and would keep
    its own last layers for that.
    """
    coordinator = _coordinator(engine)
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
    forget_release_plans()


def forget_release_plans() -> None:
    """Clear ZeRO-3's cache of the weights to release after each module.

    It is a cache on a method whose key includes the coordinator but not the order of modules that it was made for. The
    next forward fills it again.
    """
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    for name, function in vars(PartitionedParameterCoordinator).items():
        if name.endswith("__params_to_release"):
            _clear_cache(function)


def _clear_cache(function: Any) -> None:
    """Clear an ``lru_cache``, even inside the closures of decorators."""
    if hasattr(function, "cache_clear"):
        function.cache_clear()
    for cell in getattr(function, "__closure__", None) or ():
        _clear_cache(cell.cell_contents)


def _module_stack() -> list[nn.Module]:
    """The modules that ZeRO-3's hooks consider active, innermost last."""
    from deepspeed.runtime.zero import parameter_offload

    stack: list[nn.Module] = getattr(parameter_offload, "FWD_MODULE_STACK", [])
    return stack


def _coordinator(engine: Any) -> Any:
    """The object that gathers and releases weights; it belongs to the optimizer, or to its substitute if frozen."""
    optimizer = engine.optimizer
    return getattr(optimizer, "parameter_offload", optimizer).get_param_coordinator()
