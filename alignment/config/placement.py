"""Placements of frozen models (references and reward models), and the DeepSpeed JSON of each.

A placement is requested by name, determined by a DeepSpeed JSON of the model, or chosen automatically.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alignment.config.deepspeed import (
    Situation,
    check_param_offload,
    checked_copy,
    finished,
    load_deepspeed_config,
    offload_device,
    source_of,
)
from alignment.config.deepspeed_keys import value_at
from alignment.config.dtypes import DtypePlan, check_against_json, uses_cuda
from alignment.config.errors import OptionError, counted


@dataclass(frozen=True)
class Placement:
    """A placement of a frozen model.

    Attributes:
        name: value of the option.
        settings: name of the packaged DeepSpeed JSON of its engine.
        cost: memory that it takes; ``{size}`` is the bytes per parameter, ``{ranks}`` is ``4 ranks``.
    """

    name: str
    settings: str
    cost: str

    def describe(self, size: str, ranks: int) -> str:
        """Describe the placement and its cost."""
        return f"{self.name} ({self.cost.format(size=size, ranks=counted(ranks, 'rank'))})"


PLACEMENTS = {
    placement.name: placement
    for placement in (
        Placement("offload", "ref_offload", "{size} bytes per parameter in host memory, sharded over {ranks}"),
        Placement("sharded", "ref_sharded", "{size} bytes per parameter, sharded over the devices of {ranks}"),
        Placement("replica", "ref_replica", "{size} bytes per parameter on every device"),
    )
}


@dataclass(frozen=True)
class FrozenPlan:
    """The placement of a frozen model, and the checked DeepSpeed JSON of its engine."""

    placement: Placement
    ds_config: dict[str, Any]


def placement_of(base: dict[str, Any]) -> str:
    """Return the placement of an engine with this JSON: ``offload``, ``sharded`` or ``replica``."""
    if value_at(base, "zero_optimization.stage") != 3:
        return "replica"
    device = value_at(base, "zero_optimization.offload_param.device")
    return "sharded" if device in (None, "none") else "offload"


def default_placement(options: Any) -> str:
    """Return the placement if sizes are unknown: ``offload`` on GPUs, ``replica`` on CPUs, which have one memory."""
    return "offload" if uses_cuda(options) else "replica"


def plan_frozen(
    options: Any,
    owner: str,
    *,
    placement: str | None,
    deepspeed: str | dict[str, Any] | None,
    dtypes: DtypePlan,
    world_size: int,
    hidden_size: int,
    micro_batch: int,
) -> FrozenPlan:
    """Plan the placement of a frozen model and the JSON of its forward-only engine.

    Args:
        options: options of the run.
        owner: prefix of the options of this model, ``ref`` or ``reward``, for messages.
        placement: the requested placement; None to use that of ``deepspeed``, or the default of the machine.
        deepspeed: JSON of its engine: path, packaged name or mapping. Defaults to that of the placement.
        dtypes: dtype plan of the run; only its compute dtype is used.
        world_size: number of ranks.
        hidden_size: hidden size of this model, for "auto".
        micro_batch: number of rows of a forward pass.

    Raises:
        OptionError: ZeRO stage 1 or 2, an optimizer offload, or a JSON that contradicts ``placement``.
    """
    if placement is not None and placement not in PLACEMENTS:
        raise OptionError(f"{owner}_placement={placement!r}: expected one of {', '.join(PLACEMENTS)}")
    if deepspeed is not None:
        base = load_deepspeed_config(deepspeed, "")
    else:
        base = load_deepspeed_config(None, PLACEMENTS[placement or default_placement(options)].settings)
    where = source_of(base)
    config, stage = checked_copy(base, where)
    found = _checked_placement(config, stage, where)
    if placement is not None and placement != found:
        raise OptionError(
            f"{where}: zero_optimization.stage={stage} (placement {found!r}) contradicts "
            f"{owner}_placement={placement!r}; change one of them"
        )
    check_against_json(dtypes.compute, "the policy", config)
    pin = uses_cuda(options)
    if found == "offload":
        config["zero_optimization"]["offload_param"].setdefault("pin_memory", pin)
    else:
        config["zero_optimization"].pop("offload_param", None)
    fixed = _fixed(dtypes, micro_batch, world_size)
    return FrozenPlan(PLACEMENTS[found], finished(config, fixed, Situation(hidden_size, stage, pin), where))


def _fixed(dtypes: DtypePlan, micro_batch: int, world_size: int) -> dict[str, tuple[Any, str]]:
    """Return the required values of a frozen engine's JSON by dotted path, each with a reason."""
    why = "an engine without optimizer steps"
    return {
        "train_micro_batch_size_per_gpu": (micro_batch, f"a micro-batch of {micro_batch} rows"),
        "gradient_accumulation_steps": (1, why),
        "train_batch_size": (micro_batch * world_size, f"a micro-batch of {micro_batch} rows x {world_size} ranks"),
        "gradient_clipping": (0.0, why),
        "bf16.enabled": (dtypes.ds["bf16"]["enabled"], f"the compute dtype {dtypes.compute}"),
        "fp16.enabled": (dtypes.ds["fp16"]["enabled"], f"the compute dtype {dtypes.compute}"),
    }


def _checked_placement(config: dict[str, Any], stage: int, where: str) -> str:
    """Return the placement of a frozen engine's JSON; remove an empty optimizer offload in place."""
    if stage in (1, 2):
        raise OptionError(
            f"{where}: zero_optimization.stage={stage}: a frozen model requires stage 3, or 0 for a replica; set one "
            "of these"
        )
    if offload_device(config, "offload_optimizer", where) != "none":
        raise OptionError(
            f"{where}: zero_optimization.offload_optimizer.device='cpu': a frozen model has no optimizer; remove it"
        )
    check_param_offload(config, stage, where)
    config["zero_optimization"].pop("offload_optimizer", None)
    return placement_of(config)
