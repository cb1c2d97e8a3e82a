"""DeepSpeed: optimizer steps that make no update, whichever wrapper the optimizer has."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

from alignment.internals.deepspeed import scales_loss
from alignment.internals.deepspeed_state import wrapper


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
