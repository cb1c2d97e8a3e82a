"""DeepSpeed, stages 1 and 2: gradients that stay on each rank until the last micro-batch, and are reduced once.

``engine.coalesce_grad_reduction()`` is the documented way. It is a context that reduces wherever it is left, also by a
window that is given up or by the garbage collector; it passes over parameters without a gradient, which then differ
from rank to rank; and at stage 2 it sums in 16 bits. So its parts are used. Seen with DeepSpeed 0.19.8, all of it.
"""

from __future__ import annotations

from typing import Any

from alignment.internals.deepspeed_state import wrapper


def can_reduce_once(engine: Any) -> bool:
    """Whether gradients may stay on the ranks: the optimizer is that of stages 1 and 2, and has the switch for it."""
    return wrapper(engine) == "zero12" and hasattr(engine.optimizer, "_coalesce_grad_reduction")


def accumulate_locally(engine: Any) -> None:
    """Sum a window's gradients on each rank in the accumulation dtype, beside the weights' own ``grad``.

    Stage 1 does so where the two dtypes differ. Stage 2 would sum in the weights' dtype what is not reduced yet.
    """
    optimizer = engine.optimizer
    optimizer.use_grad_accum_attribute = optimizer.use_separate_grad_accum


def hold_back(engine: Any) -> None:
    """From now on a backward pass leaves its gradients on this rank; until :func:`reduce_held` or :func:`let_go`."""
    engine.inside_no_sync_ctxt = engine.optimizer._coalesce_grad_reduction = True


def let_go(engine: Any) -> None:
    """The next backward pass reduces again; what was held back stays until a step clears it."""
    engine.inside_no_sync_ctxt = engine.optimizer._coalesce_grad_reduction = False
    engine.set_gradient_accumulation_boundary(True)


def reduce_held(engine: Any) -> None:
    """Reduce what was held back, and leave it for ``engine.step``; collective.

    A parameter without a gradient, such as an expert that no token of this rank went through, takes part with zeros:
    what the ranks reduce has to be the same.
    """
    import torch

    let_go(engine)
    optimizer = engine.optimizer
    attribute = "grad_accum" if optimizer.use_grad_accum_attribute else "grad"
    dtype = optimizer._gradient_reduction_buffer_dtype()
    for group in optimizer.bit16_groups:
        for parameter in group:
            if parameter.requires_grad and optimizer.get_gradient_for_reduction(parameter) is None:
                setattr(parameter, attribute, torch.zeros_like(parameter, dtype=dtype))
    engine._flush_coalesced_reduction_zero12(optimizer)


def complete_offloaded(engine: Any) -> None:
    """After the last micro-batch: an offloaded optimizer steps on the gradient of the window, whatever that left out.

    At stages 1 and 2 the copy for the optimizer is made as a parameter's gradient arrives in the last micro-batch. For
    an expert that no token of it goes through DeepSpeed leaves what was there: the gradient of the window before.
    """
    optimizer = engine.optimizer
    if wrapper(engine) != "zero12" or not optimizer.cpu_offload:
        return
    arrived, summed = optimizer.norm_for_param_grads, optimizer._offload_accumulated_param_ids
    optimizer._offload_accumulated_param_ids = summed - arrived.keys()
    optimizer._finalize_cpu_offload_gradient_accumulation()
    optimizer._offload_accumulated_param_ids = summed
    for parameters in optimizer.params_in_partition:
        for number in map(optimizer.get_param_id, parameters):
            if number not in arrived:
                group, _, offset, numel = optimizer.grad_position[number]
                optimizer.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, offset, numel).zero_()
