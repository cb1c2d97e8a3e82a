"""DeepSpeed: configuration models, compiled ops, process groups, engines and optimizers.

ZeRO-3 is in :mod:`.deepspeed_zero3`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel


_MUON = "deepspeed.runtime.zero.muon.original_muon"


def section_models() -> dict[str, type[BaseModel]]:
    """DeepSpeed's pydantic models of the sections of its JSON, by dotted path.

    ``deepspeed.initialize`` validates the configuration only after the model is loaded; with these models, unknown
    keys and invalid values are found before that. They are not exported. Seen with DeepSpeed 0.19.8.
    """
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.zero import config, leaf_module_config, offload_config
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        "zero_optimization": config.DeepSpeedZeroConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.leaf_module": leaf_module_config.DeepSpeedZeroLeafModuleConfig,
        "bf16": precision_config.DeepSpeedBF16Config,
        "fp16": precision_config.DeepSpeedFP16Config,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
    }


def is_prebuilt(builder: str) -> bool:
    """Whether an op is prebuilt in the installed DeepSpeed, by the name of its builder, such as ``CPUAdamBuilder``.

    Any other op needs a compiler at run time. The result of ``DS_BUILD_OPS`` is recorded only in the installation;
    ``builder.is_compatible()`` tells whether an op could be built. Seen with DeepSpeed 0.19.8.
    """
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops import op_builder

    return bool(installed_ops.get(getattr(op_builder, builder)().name))


def skip_shared_memory_op() -> None:
    """Prevent DeepSpeed from compiling ``shm_comm`` when a CPU group starts: 40 s, and a crash without a compiler.

    Only tensor-parallel inference calls the op, but ``init_distributed`` always builds it if the table of compatible
    ops allows it; there is no setting. Without the op, DeepSpeed uses gloo. Seen with DeepSpeed 0.19.8.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def measure_free_memory(free_bytes: Callable[[torch.device], int]) -> None:
    """Let DeepSpeed measure the free memory of a GPU with ``free_bytes``.

    If pynvml is installed, ``CUDA_Accelerator.available_memory`` (``deepspeed/accelerator/cuda_accelerator.py``) looks
    the GPU up by its number in ``CUDA_VISIBLE_DEVICES``, which is a ``ValueError`` if it contains UUIDs or MIG names,
    and another GPU if CUDA's order is not NVML's. ZeRO stages 1 and 2 call it when they flatten weights
    (``runtime/zero/stage_1_and_2.py``). Seen with DeepSpeed 0.19.8.

    Args:
        free_bytes: returns the bytes that this process can still allocate on a device.
    """
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    def available_memory(accelerator: Any, device_index: int | None = None) -> int:
        return free_bytes(accelerator.device(accelerator.current_device() if device_index is None else device_index))

    CUDA_Accelerator.available_memory = available_memory


def partitions_weights(engine: Any) -> bool:
    """Whether an engine partitions the weights (ZeRO-3).

    The engine's accessors of its configuration are not documented. Seen with DeepSpeed 0.19.8.
    """
    return bool(engine.zero_optimization_partition_weights())


def scales_loss(engine: Any) -> bool:
    """Whether an engine trains in fp16, where a non-finite gradient means a lower loss scale rather than a fault.

    The engine's accessors of its configuration are not documented. Seen with DeepSpeed 0.19.8.
    """
    return bool(engine.fp16_enabled())


def destroy(engine: Any) -> None:
    """Remove an engine's hooks and release its optimizer's memory.

    The method is not documented and is called only by ``__del__``, which is too late if a reference cycle keeps the
    engine alive. Seen with DeepSpeed 0.19.8.
    """
    engine.destroy()


def import_muon() -> None:
    """Import the Muon optimizer so that its functions are compiled at their first call.

    ``deepspeed.initialize`` imports it for any optimizer, and it is decorated with ``torch.compile``, which imports
    all of torch's compiler: 1.7 s of CPU time. No effect if it is already imported, or has moved. Seen with DeepSpeed
    0.19.8.
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
    """Whether ``engine.get_global_grad_norm()`` returns a number after a step.

    It does if DeepSpeed wraps the optimizer, whose ``_global_grad_norm`` the engine copies. At stage 0 in fp32 the
    optimizer is not wrapped, and the norm stays None. This must be known before the step, which clears gradients; the
    wrapper of stage 1 in bf16 with fp32 accumulation has the attribute only after its first step. Seen with DeepSpeed
    0.19.8.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    return hasattr(engine.optimizer, "_global_grad_norm") or isinstance(engine.optimizer, BF16_Optimizer)


def undo_dummy_step(optimizer: Any) -> None:
    """Clear the states of a wrapped optimizer, and copy its master weights from the model's weights again.

    DeepSpeed's 16-bit wrappers at ZeRO stage 0 allocate the optimizer's memory by a step on zero gradients. Adam
    counts that step (its first real update is a quarter too small), and weight decay is applied to the master weights
    once. deepspeed #5151 reports the same for ``BF16_Optimizer``. Seen with DeepSpeed 0.19.8.

    Args:
        optimizer: optimizer of an engine, wrapped or not; one without a step by DeepSpeed is not changed.
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


def set_timeout_of_new_groups(timeout: timedelta) -> None:
    """Set the timeout of all groups that DeepSpeed creates from now on.

    It reduces gradients and gathers weights in a copy of the default group that is created without a timeout: torch
    then uses the backend's default, 10 minutes with NCCL, regardless of the default group. Neither a setting nor an
    argument changes that. Seen with DeepSpeed 0.19.8.
    """
    import torch
    from deepspeed.comm import comm

    comm.cdb.new_group = functools.partial(torch.distributed.new_group, timeout=timeout)
