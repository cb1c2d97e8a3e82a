"""DeepSpeed's wrapped optimizers: the tensors that they update, their parameters, the loss scale, and counters.

None of it is public: ``engine.save_checkpoint`` is the only documented access to the state, and pickles all of it. The
wrappers are distinguished by their class. Seen with DeepSpeed 0.19.8.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
# The mutable state of a dynamic loss scale; its other attributes are configuration.
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class Piece(NamedTuple):
    """A range of elements of a model's parameter within a unit.

    Attributes:
        parameter: parameter of the model; under ZeRO-3, its own memory may be empty.
        start: first element of the flattened parameter.
        offset: first element of the flattened unit.
        numel: number of elements.
    """

    parameter: nn.Parameter
    start: int
    offset: int
    numel: int


class Unit(NamedTuple):
    """One tensor that the inner optimizer updates: a parameter, a copy of it, or a partition of many.

    Attributes:
        master: the tensor; the optimizer's state is ``optimizer.state[master]``.
        group: number of its parameter group.
        pieces: its parts of parameters, in the order of their offsets; alignment padding belongs to none of them.
    """

    master: Tensor
    group: int
    pieces: tuple[Piece, ...]


def inner_optimizer(engine: Any) -> Optimizer:
    """The optimizer that makes the updates: torch's, bitsandbytes', DeepSpeed's compiled one or the user's."""
    optimizer: Optimizer = engine.optimizer.optimizer if wrapper(engine) else engine.optimizer
    return optimizer


def replicates_state(engine: Any) -> bool:
    """Whether every rank has the same master weights and states, that is, whether ZeRO is off."""
    return not engine.zero_optimization()


def zero_stage(engine: Any) -> int:
    """The ZeRO stage."""
    return int(engine.zero_optimization_stage())


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """The unsharded shape of a parameter, which ZeRO-3 may have partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def state_units(engine: Any) -> list[Unit]:
    """The units of this rank, in an order determined by model, optimizer and split."""
    optimizer, kind = engine.optimizer, wrapper(engine)
    if kind == "zero3":
        return list(_zero3_units(optimizer))
    if kind == "zero12":
        return list(_zero12_units(optimizer))
    if kind == "bf16":
        return list(_bf16_units(optimizer))
    if kind == "fused":
        return [
            Unit(master, number, tuple(_laid_out(weights, 0, master.numel())))
            for number, (master, weights) in enumerate(zip(optimizer.fp32_groups_flat, optimizer.fp16_groups))
        ]
    if kind == "unfused":
        masters, weights = optimizer.fp32_groups, optimizer.fp16_groups
    else:
        masters = weights = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    return [
        Unit(master, number, (Piece(weight, 0, 0, master.numel()),))
        for number, group in enumerate(zip(masters, weights, strict=True))
        for master, weight in zip(*group, strict=True)
    ]


def refresh_weights(engine: Any) -> None:
    """Set the model's weights from the master weights, as after a step of the inner optimizer. Collective.

    This includes the partitions of other ranks and the small weights that ZeRO-3 does not partition.
    """
    import torch

    optimizer, kind = engine.optimizer, wrapper(engine)
    with torch.no_grad():
        if kind == "zero3":
            optimizer.checkpoint_event_prologue()
            for number in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
            optimizer.checkpoint_event_epilogue()
        elif kind in ("zero12", "bf16"):
            optimizer.update_lp_params()
        elif kind is not None:
            for unit in state_units(engine):
                for weight, start, offset, numel in unit.pieces:
                    weight.data.view(-1)[start : start + numel].copy_(unit.master.view(-1)[offset : offset + numel])


def loss_scale_state(engine: Any) -> dict[str, Any]:
    """The state of a dynamic loss scale as numbers by name; empty if there is none."""
    scaler = dynamic_scaler(engine)
    return {} if scaler is None else {name: getattr(scaler, name) for name in _SCALE if hasattr(scaler, name)}


def set_loss_scale_state(engine: Any, state: dict[str, Any]) -> None:
    """Restore a state from :func:`loss_scale_state`; values that this engine's scaler does not have are ignored.

    ZeRO's scaler and that of stage 0 share everything except the hysteresis, which stage 0 lacks.
    """
    scaler = dynamic_scaler(engine)
    for name in _SCALE:
        if scaler is not None and name in state and hasattr(scaler, name):
            setattr(scaler, name, state[name])


def counters(engine: Any) -> dict[str, int]:
    """The engine's counts of steps, micro-steps, samples and skipped steps."""
    return {name: int(getattr(engine, name)) for name in _COUNTERS}


def set_counters(engine: Any, state: dict[str, int]) -> None:
    """Restore counts from :func:`counters`."""
    for name in _COUNTERS:
        setattr(engine, name, state[name])


def replay_cpu_adam(optimizer: Any, steps: int) -> None:
    """Advance DeepSpeed's CPU Adam to the step count of its restored states; other optimizers are not changed.

    The powers of its betas are running products inside the compiled optimizer, in fp32. After a restart it would
    compute them by ``pow``, which differs in the last bits, and so would every further step.

    Args:
        optimizer: an inner optimizer.
        steps: number of steps in its states.
    """
    update = getattr(getattr(optimizer, "ds_opt_adam", None), "adam_update", None)
    if update is None:
        return
    import torch

    names = ("eps", "weight_decay", "bias_correction")
    settings = [(g["lr"], *g["betas"], *(g[name] for name in names)) for g in optimizer.param_groups]
    zeros = [torch.zeros(1) for _ in range(4)]
    for step, of_group in itertools.product(range(1, steps + 1), settings):
        update(optimizer.opt_id, step, *of_group, *zeros)


def wrapper(engine: Any) -> str | None:
    """The kind of DeepSpeed wrapper around the engine's optimizer; None for a bare one."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    kinds = {
        DeepSpeedZeroOptimizer_Stage3: "zero3",
        DeepSpeedZeroOptimizer: "zero12",
        BF16_Optimizer: "bf16",
        FP16_Optimizer: "fused",
        FP16_UnfusedOptimizer: "unfused",
    }
    return next((name for kind, name in kinds.items() if isinstance(engine.optimizer, kind)), None)


def _laid_out(parameters: list[Any], begin: int, length: int, offsets: list[int] | None = None) -> Iterator[Piece]:
    """The pieces of consecutive parameters within ``length`` elements from ``begin``."""
    sizes = [parameter.numel() for parameter in parameters]
    offsets = offsets or [0, *itertools.accumulate(sizes)][: len(sizes)]
    for parameter, offset, size in zip(parameters, offsets, sizes, strict=True):
        first, last = max(offset, begin), min(offset + size, begin + length)
        if first < last:
            yield Piece(parameter, first - offset, first - begin, last - first)


def _zero12_units(optimizer: Any) -> Iterator[Unit]:
    """Stages 1 and 2: each group is flattened, in round-robin order if configured, and split into equal partitions."""
    from deepspeed import comm

    for group, master in enumerate(optimizer.single_partition_of_fp32_groups):
        rank = comm.get_rank(group=optimizer.real_dp_process_group[group])
        parameters, offsets = optimizer.round_robin_bit16_groups[group], optimizer.round_robin_bit16_offsets[group]
        pieces = _laid_out(parameters, rank * optimizer.partition_size[group], master.numel(), offsets)
        yield Unit(master, group, tuple(pieces))


def _bf16_units(optimizer: Any) -> Iterator[Unit]:
    """Stage 1 in bf16 with fp32 accumulation: the same, with a separate class."""
    from deepspeed import comm

    for group, master in enumerate(optimizer.fp32_groups_flat_partition):
        rank = comm.get_rank(group=optimizer.real_dp_process_group[group])
        pieces = _laid_out(optimizer.bf16_groups[group], rank * master.numel(), master.numel())
        yield Unit(master, group, tuple(pieces))


def _zero3_units(optimizer: Any) -> Iterator[Unit]:
    """Stage 3: each parameter is split into equal shares; a sub-group is the concatenation of this rank's shares."""
    for number, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        rank = optimizer._get_sub_group_partition_rank(number)
        pieces, offset = [], 0
        for parameter in optimizer.fp16_groups[number]:
            share = parameter.partition_numel()
            start = rank * share
            numel = min(share, parameter.ds_numel - start)
            if numel > 0:
                pieces.append(Piece(parameter, start, offset, numel))
            offset += share
        yield Unit(master, optimizer.sub_group_to_group_id[number], tuple(pieces))


def dynamic_scaler(engine: Any) -> Any:
    """The object that holds a dynamic loss scale; None if there is none."""
    optimizer = engine.optimizer
    config = getattr(optimizer, "loss_scale_config", None)
    if config is not None:
        return config if config.dynamic_loss_scale else None
    scaler = getattr(optimizer, "loss_scaler", None)
    return scaler if scaler is not None and scaler.dynamic else None
