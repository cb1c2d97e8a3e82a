"""DeepSpeed at stages 1 and 2: gradients that stay on each rank until the last micro-batch and are reduced once.

The documented way is ``engine.coalesce_grad_reduction()``. It is a context manager that reduces on every exit, even of
an abandoned window or by the garbage collector; it skips parameters without a gradient, which then differ between
ranks; and at stage 2 it sums in 16 bits. Therefore its parts are used instead. Seen with DeepSpeed 0.19.8.
"""

from __future__ import annotations

from typing import Any

from alignment.internals.deepspeed_state import wrapper


def can_reduce_once(engine: Any) -> bool:
    """Whether gradients can stay on the ranks: the optimizer is that of stages 1 and 2 and supports it."""
    return wrapper(engine) == "zero12" and hasattr(engine.optimizer, "_coalesce_grad_reduction")


def accumulate_locally(engine: Any) -> None:
    """Sum a window's gradients on each rank in the accumulation dtype, separately from the weights' ``grad``.

    Stage 1 does so if the two dtypes differ. Stage 2 would sum unreduced gradients in the weights' dtype.
    """
    optimizer = engine.optimizer
    optimizer.use_grad_accum_attribute = optimizer.use_separate_grad_accum


def hold_back(engine: Any) -> None:
    """Keep the gradients of backward passes on this rank until :func:`reduce_held` or :func:`let_go`."""
    engine.inside_no_sync_ctxt = engine.optimizer._coalesce_grad_reduction = True


def let_go(engine: Any) -> None:
    """Let the next backward pass reduce again; held gradients stay until a step clears them."""
    engine.inside_no_sync_ctxt = engine.optimizer._coalesce_grad_reduction = False
    engine.set_gradient_accumulation_boundary(True)


def reduce_held(engine: Any) -> None:
    """Reduce the held gradients for ``engine.step``. Collective.

    A parameter without a gradient, such as an expert without tokens on this rank, contributes zeros: all ranks must
    reduce the same parameters.
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
    """After the last micro-batch, complete the gradients of an offloaded optimizer.

    At stages 1 and 2, the optimizer's copy is made when a parameter's gradient arrives in the last micro-batch. For an
    expert without tokens there, DeepSpeed keeps the gradient of the previous window.
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
