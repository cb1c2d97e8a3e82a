"""DeepSpeed: steps in fp16, and steps without an update, for any wrapper of the optimizer."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock

from alignment.internals.deepspeed import scales_loss
from alignment.internals.deepspeed_state import dynamic_scaler, replicates_state, wrapper

if TYPE_CHECKING:
    from torch import Tensor


def skip_invalid_norm(engine: Any) -> None:
    """Check at stages 1 and 2 in bf16 only by the norm whether a gradient is finite.

    Every wrapper computes the norm before the update, and skips the update if the norm is inf or nan; a bare optimizer
    (stage 0 in fp32) does not. In bf16, that of stages 1 and 2 does so only with the default
    ``bf16.check_grad_overflow``, which also scans all gradients once more. Seen with DeepSpeed 0.19.8.
    """
    optimizer = engine.optimizer
    if wrapper(engine) == "zero12" and not scales_loss(engine):
        optimizer.check_overflow = lambda partition_gradients=True: None
        optimizer.check_grad_overflow = True


def discard_gradients(engine: Any) -> None:
    """Take a step without an update: gradients are cleared; weights, states and loss scale do not change.

    DeepSpeed offers this only for an fp16 overflow, so it is made to see one, but without the change of the loss
    scale. It counts the step as skipped and does not advance the learning rate schedule. Seen with DeepSpeed 0.19.8.
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
            # Clipping fails without a single gradient.
            patched.enter_context(mock.patch.object(engine, "clip_fp32_gradients", lambda: None))
        else:
            replace("step", optimizer._skip_invalid_grad_norm)
        if kind not in ("bf16", None):
            replace("_update_scale", lambda has_overflow=False: None)
        engine.set_gradient_accumulation_boundary(True)  # in the middle of a window, the step would do nothing
        engine.step()


def loss_scale(engine: Any) -> float:
    """The loss scale in fp16; every wrapper has one. Seen with DeepSpeed 0.19.8."""
    return float(engine.optimizer.loss_scale)


def scaled_where_missing(engine: Any, loss: Tensor) -> Tensor:
    """Scale the loss where DeepSpeed only divides gradients by the loss scale: in fp16 at stage 0.

    ``engine.backward`` scales the loss only for ZeRO's optimizers. The wrappers of stage 0 have a ``backward`` that
    does it, but the engine never calls it, and a ``step`` that divides: without this function, gradients would
    initially be too small by a factor of 65536. Seen with DeepSpeed 0.19.8.
    """
    if scales_loss(engine) and replicates_state(engine):
        return loss.float() * loss_scale(engine)
    return loss


def step_in_fp16(engine: Any) -> float | None:
    """Take a step in fp16; return the norm without the loss scale, or None after an overflow without an update.

    The loss scale is not changed after an overflow, see :func:`lower_loss_scale`. Every ``loss_scale_window`` steps it
    grows, here after the step: the wrappers increase it before they divide the gradient by it, which would halve the
    gradient of the step. The norm of ``FP16_UnfusedOptimizer`` includes the scale. Seen with DeepSpeed 0.19.8.
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
    """Lower the loss scale after an overflow as DeepSpeed does; return False if it is static or at its minimum.

    With ``hysteresis``, DeepSpeed lowers the scale only at the second overflow and drops the batch of the first. A
    batch that is retried would overflow at the same scale again, so the second overflow is counted immediately. At the
    minimum, ZeRO's scaler raises a bare ``Exception``; that of stage 0 does nothing. Seen with DeepSpeed 0.19.8.
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
    """After a window's first micro-batch, clear the older sums of parameters that it has no gradient for.

    DeepSpeed overwrites the older sums with the gradients of the first micro-batch and adds those of the others. For a
    parameter without a gradient in the first, such as an expert without tokens, the older sum remains: at stage 3, and
    at stages 1 and 2 in host memory. Seen with DeepSpeed 0.19.8.

    Args:
        engine: a training engine.
        several: whether the window has more micro-batches; with a single one, stages 1 and 2 keep no sums.
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
    if arrived is not None:  # earlier releases of 0.19 may not record what has arrived
        for number in sums.keys() - arrived:
            sums[number].zero_()


def complete_partitioned(engine: Any) -> None:
    """After the last micro-batch at stage 3, complete the gradients of an offloaded optimizer.

    The optimizer's copy is made when a parameter's gradient arrives in the last micro-batch. For a parameter without
    one there, the gradient of the previous window would remain and the norm would omit it. Seen with DeepSpeed 0.19.8.
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
    """After a step without an update, clear all sums, so that they are not added to the next window.

    After an overflow at stages 1 and 2, DeepSpeed drops an offloaded optimizer's gradients in host memory but keeps
    the fp32 sums on the device, to which the next window is added: nan stays nan at any loss scale. Without offload,
    it keeps the sums of a window that was abandoned before its last micro-batch. Seen with DeepSpeed 0.19.8.
    """
    if wrapper(engine) == "zero12":
        engine.optimizer.averaged_gradients.clear()
        engine.optimizer.all_grad_tensors.clear()
