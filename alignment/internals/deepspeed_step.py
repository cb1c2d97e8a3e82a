"""DeepSpeed: steps in fp16, and steps that make no update, whichever wrapper the optimizer has."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock

from alignment.internals.deepspeed import scales_loss
from alignment.internals.deepspeed_state import dynamic_scaler, replicates_state, wrapper

if TYPE_CHECKING:
    from torch import Tensor


def skip_invalid_norm(engine: Any) -> None:
    """Let the norm alone say whether a gradient is finite, at stages 1 and 2 in bf16.

    Every wrapper computes the norm before the update, and skips an update whose norm is inf or nan; a bare optimizer
    (stage 0 in fp32) skips nothing. In bf16 that of stages 1 and 2 does so only with ``bf16.check_grad_overflow``, the
    default, by which it also goes through all gradients once more. Seen with DeepSpeed 0.19.8.
    """
    optimizer = engine.optimizer
    if wrapper(engine) == "zero12" and not scales_loss(engine):
        optimizer.check_overflow = lambda partition_gradients=True: None
        optimizer.check_grad_overflow = True


def discard_gradients(engine: Any) -> None:
    """Take a step that makes no update: gradients are cleared, and weights, states and loss scale are left alone.

    DeepSpeed offers this for an fp16 overflow only, so it is told that there was one; what it does to the loss scale
    is left out. It counts the step among those skipped, and does not move the learning rate's schedule. Seen with
    DeepSpeed 0.19.8.
    """
    optimizer, kind = engine.optimizer, wrapper(engine)

    def overflows(*args: Any, **kwargs: Any) -> None:
        optimizer.overflow = True

    with ExitStack() as patched:

        def replace(name: str, value: Any, **kwargs: Any) -> None:
            patched.enter_context(mock.patch.object(optimizer, name, value, **kwargs))

        if kind == "zero12":
            replace("check_grad_overflow", True)
            replace("check_overflow", overflows)
        elif kind == "zero3":
            replace("_overflow_check_and_loss_scale_update", overflows)
        elif kind == "bf16":
            replace("step", overflows)  # the engine clears the gradients of both precisions after it
        elif kind is None:
            replace("step", overflows)
            replace("overflow", True, create=True)
        else:
            replace("step", optimizer._skip_invalid_grad_norm)
        if kind not in ("bf16", None):
            replace("_update_scale", lambda has_overflow=False: None)
        engine.set_gradient_accumulation_boundary(True)  # elsewhere, in the middle of a window, it would do nothing
        engine.step()


def loss_scale(engine: Any) -> float:
    """What the loss is multiplied by in fp16; every wrapper has it. Seen with DeepSpeed 0.19.8."""
    return float(engine.optimizer.loss_scale)


def scaled_where_missing(engine: Any, loss: Tensor) -> Tensor:
    """The loss, times the loss scale where DeepSpeed divides gradients by it but multiplies nothing: fp16 at stage 0.

    ``engine.backward`` scales the loss for ZeRO's optimizers alone. The wrappers of stage 0 have a ``backward`` that
    does it, which the engine never calls, and a ``step`` that divides: without this their gradients are 65536 times
    too small at first. Seen with DeepSpeed 0.19.8.
    """
    if scales_loss(engine) and replicates_state(engine):
        return loss.float() * loss_scale(engine)
    return loss


def step_in_fp16(engine: Any) -> float | None:
    """Take a step in fp16; its gradient's norm without the loss scale, None where it overflowed: no update was made.

    The loss scale is left alone after an overflow, see :func:`lower_loss_scale`. Where it grows, every
    ``loss_scale_window`` steps, it does so after the step: the wrappers raise it before they divide the gradient by
    it, so that the step is that of half the gradient. The norm of ``FP16_UnfusedOptimizer`` includes the scale. Seen
    with DeepSpeed 0.19.8.
    """
    optimizer, scale = engine.optimizer, loss_scale(engine)
    overflows: list[bool] = []
    with mock.patch.object(optimizer, "_update_scale", lambda overflow=False: overflows.append(bool(overflow))):
        engine.step()
    (overflow,) = overflows
    if overflow:
        return None
    optimizer._update_scale(False)
    norm = float(engine.get_global_grad_norm())
    return norm / scale if wrapper(engine) == "unfused" else norm


def lower_loss_scale(engine: Any) -> bool:
    """After an overflow: lower the loss scale as DeepSpeed does; False where it is static, or at its minimum.

    With ``hysteresis`` DeepSpeed lowers the scale at the second overflow only. It drops the batch in between; for one
    that is tried again, which overflows at the same scale again, that second one is counted at once. At the minimum
    ZeRO's scaler raises a bare ``Exception``, and that of stage 0 does nothing. Seen with DeepSpeed 0.19.8.
    """
    scaler = dynamic_scaler(engine)
    if scaler is None:
        return False
    least = scaler.min_scale if hasattr(scaler, "min_scale") else scaler.min_loss_scale
    for _ in range(max(1, getattr(scaler, "cur_hysteresis", 1))):
        if loss_scale(engine) <= least:
            return False
        engine.optimizer._update_scale(True)
    return True


def drop_older(engine: Any, several: bool) -> None:
    """After the first micro-batch of a window: what it left alone is not added to the sums of the window before.

    DeepSpeed writes the gradients of the first micro-batch over the older sums and adds those of the others. For a
    parameter without a gradient in the first, such as an expert that no token went through, the older sums stay: at
    stage 3, and at stages 1 and 2 in host memory. Seen with DeepSpeed 0.19.8.

    Args:
        engine: a training one.
        several: the window has further micro-batches; of a single one stages 1 and 2 keep no sums.
    """
    optimizer, kind = engine.optimizer, wrapper(engine)
    if kind == "zero3":
        sums = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        arrived = getattr(optimizer, "_offload_boundary_param_ids", None)
    elif kind == "zero12" and optimizer.cpu_offload and several:
        sums = optimizer.accumulated_grads_in_cpu
        arrived = getattr(optimizer, "_offload_accumulated_param_ids", None)
    else:
        return
    if arrived is not None:  # earlier releases of 0.19 may not note what has arrived
        for number in sums.keys() - arrived:
            sums[number].zero_()


def complete_partitioned(engine: Any) -> None:
    """After the last micro-batch, at stage 3: an offloaded optimizer steps on the gradient of the window.

    The copy for the optimizer is made as a parameter's gradient arrives in the last micro-batch. Of one that has none
    there, the gradient of the window before would stay, and the norm would leave it out. Seen with DeepSpeed 0.19.8.
    """
    optimizer = engine.optimizer
    if wrapper(engine) != "zero3" or not optimizer.offload_optimizer:
        return
    if not hasattr(optimizer, "_finalize_offload_gradient_accumulation"):
        return  # an earlier release of 0.19
    arrived, kept = optimizer.norm_for_param_grads, optimizer._offload_boundary_param_ids
    parameters = (p for group in optimizer.fp16_groups for p in group if p.requires_grad)
    optimizer._offload_boundary_param_ids = {p.ds_id for p in parameters if optimizer.get_param_id(p) not in arrived}
    optimizer._finalize_offload_gradient_accumulation()
    optimizer._offload_boundary_param_ids = kept


def forget_sums(engine: Any) -> None:
    """After a step that made no update: nothing that was summed is added to the next window.

    A step of stages 1 and 2 that overflows drops an offloaded optimizer's gradients in host memory, but keeps the fp32
    sums on the device, which the next window is added to: nan stays nan, at whatever loss scale. Without offload it
    keeps what was summed of a window that was given up before its last micro-batch. Seen with DeepSpeed 0.19.8.
    """
    if wrapper(engine) == "zero12":
        engine.optimizer.averaged_gradients.clear()
        engine.optimizer.all_grad_tensors.clear()
