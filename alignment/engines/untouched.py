"""An optimizer that begins at step 0, also where DeepSpeed has already taken one.

DeepSpeed's 16-bit wrappers at ZeRO stage 0 reserve the optimizer's memory by a step on gradients of zero. Adam then
counts that step (its first real update comes out a quarter too small), and weight decay has decayed the masters once.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer


@torch.no_grad()
def undo_dummy_step(optimizer: Any) -> None:
    """Forget the states of a wrapped optimizer, and take its masters from the model's weights anew.

    Args:
        optimizer: an engine's, wrapped or not; one that DeepSpeed has not stepped is left alone.
    """
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        masters = [master for group in optimizer.fp32_groups for master in group]
        weights = [weight for group in optimizer.fp16_groups for weight in group]
    elif isinstance(optimizer, FP16_Optimizer):
        masters, weights = optimizer.fp32_groups_flat, optimizer.fp16_groups_flat
    else:
        return
    optimizer.optimizer.state.clear()
    for master, weight in zip(masters, weights, strict=True):
        master.copy_(weight)
