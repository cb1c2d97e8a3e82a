"""DeepSpeed: configuration models, compiled ops, engines and optimizers. ZeRO-3 is in :mod:`.deepspeed_zero3`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

_MUON = "deepspeed.runtime.zero.muon.original_muon"


def section_models() -> dict[str, type[BaseModel]]:
    """The pydantic models by which DeepSpeed reads the sections ``zero_optimization``, ``bf16`` and ``fp16``.

    ``deepspeed.initialize`` checks a JSON only once the model is loaded; with its models a wrong value is found before
    that. They are not exported. Seen with DeepSpeed 0.19.8.
    """
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}


def is_prebuilt(builder: str) -> bool:
    """Whether an op came compiled with the installed DeepSpeed, by the name of its builder such as ``CPUAdamBuilder``.

    Any other op needs a compiler at run time. What ``DS_BUILD_OPS`` built is recorded in the installation alone;
    ``builder.is_compatible()`` says whether an op could be built. Seen with DeepSpeed 0.19.8.
    """
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops import op_builder

    return bool(installed_ops.get(getattr(op_builder, builder)().name))


def skip_shared_memory_op() -> None:
    """Keep DeepSpeed from compiling ``shm_comm`` as a CPU group starts: 40 s, and a crash without a compiler.

    Only tensor-parallel inference calls the op, but ``init_distributed`` always builds it where the table of
    compatible ops allows; there is no setting. Without the op DeepSpeed uses gloo. Seen with DeepSpeed 0.19.8.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def partitions_weights(engine: Any) -> bool:
    """Whether an engine partitions the weights, that is, runs ZeRO-3.

    The engine reads its configuration by methods without documentation. Seen with DeepSpeed 0.19.8.
    """
    return bool(engine.zero_optimization_partition_weights())


def scales_loss(engine: Any) -> bool:
    """Whether an engine trains in fp16, where a gradient that is not finite means a lower loss scale and no fault.

    The engine reads its configuration by methods without documentation. Seen with DeepSpeed 0.19.8.
    """
    return bool(engine.fp16_enabled())


def destroy(engine: Any) -> None:
    """Remove an engine's hooks and release its optimizer's memory.

    The method is neither documented nor called by anything but ``__del__``, which is too late where a reference cycle
    keeps the engine. Seen with DeepSpeed 0.19.8.
    """
    engine.destroy()


def import_muon() -> None:
    """Import the Muon optimizer, whose functions are then compiled when they are called for the first time.

    ``deepspeed.initialize`` imports it whatever the optimizer, and it decorates with ``torch.compile``, which imports
    torch's whole compiler: 1.7 s of CPU. Nothing is done where it is imported already, or is elsewhere. Seen with
    DeepSpeed 0.19.8.
    """
    from unittest import mock

    import torch

    try:
        compiler, missing = import_module("deepspeed.runtime.compiler"), find_spec(_MUON) is None
    except ImportError:
        return
    original = getattr(compiler, "compile", None)
    if original is None or missing or _MUON in sys.modules:
        return

    def compiled_on_use(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] | None = None

        @functools.wraps(function)
        def on_use(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiled
            if compiled is None:
                compiled = torch.compile(function)
            return compiled(*args, **kwargs)

        return on_use

    def decorator(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if args or kwargs else compiled_on_use

    with mock.patch.object(compiler, "compile", decorator):
        import_module(_MUON)


def reports_grad_norm(engine: Any) -> bool:
    """Whether ``engine.get_global_grad_norm()`` is a number after a step.

    It is where DeepSpeed wraps the optimizer, whose ``_global_grad_norm`` the engine copies. At stage 0 in fp32 the
    optimizer is not wrapped, and the norm stays None. This has to be known before the step, which clears gradients;
    the wrapper of stage 1 in bf16 with fp32 accumulation has the norm from its first step on only. Seen with DeepSpeed
    0.19.8.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    return hasattr(engine.optimizer, "_global_grad_norm") or isinstance(engine.optimizer, BF16_Optimizer)


def undo_dummy_step(optimizer: Any) -> None:
    """Forget the states of a wrapped optimizer, and copy its masters from the model's weights again.

    DeepSpeed's 16-bit wrappers at ZeRO stage 0 reserve the optimizer's memory by a step on gradients of zero. Adam
    then counts that step (its first real update comes out a quarter too small), and weight decay has decayed the
    masters once. deepspeed #5151 reports the same of ``BF16_Optimizer``. Seen with DeepSpeed 0.19.8.

    Args:
        optimizer: an engine's, wrapped or not; one that DeepSpeed has not stepped is left alone.
    """
    import torch
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    if isinstance(optimizer, FP16_UnfusedOptimizer):
        masters = [master for group in optimizer.fp32_groups for master in group]
        weights = [weight for group in optimizer.fp16_groups for weight in group]
    elif isinstance(optimizer, FP16_Optimizer):
        masters, weights = optimizer.fp32_groups_flat, optimizer.fp16_groups_flat
    else:
        return
    optimizer.optimizer.state.clear()
    with torch.no_grad():
        for master, weight in zip(masters, weights, strict=True):
            master.copy_(weight)
