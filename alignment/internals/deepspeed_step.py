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
    scaler, before = dynamic_scaler(engine), loss_scale(engine)
    if scaler is None:
        return False
    least = scaler.min_scale if hasattr(scaler, "min_scale") else scaler.min_loss_scale
    for _ in range(max(1, getattr(scaler, "cur_hysteresis", 1))):
        if loss_scale(engine) <= least:
            return False
        engine.optimizer._update_scale(True)
    return loss_scale(engine) < before
