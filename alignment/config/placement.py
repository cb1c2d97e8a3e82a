"""Where a frozen model lives: one table for references and reward models, and the DeepSpeed JSON that follows from it.

A placement is asked for by name, or read off a DeepSpeed JSON of the model's own, or chosen by the machine.
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
from alignment.config.errors import OptionError


@dataclass(frozen=True)
class Placement:
    """One way to keep a frozen model.

    Attributes:
        name: as options say it.
        settings: the packaged DeepSpeed JSON of its engine.
        cost: what it takes; ``{size}`` is the bytes of a parameter, ``{ranks}`` the number of ranks.
    """

    name: str
    settings: str
    cost: str

    def describe(self, size: str, ranks: int) -> str:
        """The placement and its cost."""
        return f"{self.name} ({self.cost.format(size=size, ranks=ranks)})"


PLACEMENTS = {
    placement.name: placement
    for placement in (
        Placement("offload", "ref_offload", "{size} bytes per parameter, divided by {ranks} rank(s), in host memory"),
        Placement("sharded", "ref_sharded", "{size} bytes per parameter, divided by {ranks} rank(s), on the devices"),
        Placement("replica", "ref_replica", "{size} bytes per parameter on every device"),
    )
}


@dataclass(frozen=True)
class FrozenPlan:
    """How a frozen model is kept: its placement, and the checked DeepSpeed JSON of its engine."""

    placement: Placement
    ds_config: dict[str, Any]


def placement_of(base: dict[str, Any]) -> str:
    """Where an engine with this JSON keeps its parameters: ``offload``, ``sharded`` or ``replica``."""
    if value_at(base, "zero_optimization.stage") != 3:
        return "replica"
    device = value_at(base, "zero_optimization.offload_param.device")
    return "sharded" if device in (None, "none") else "offload"


def default_placement(options: Any) -> str:
    """Where sizes do not say: ``offload`` on a GPU; ``replica`` on a CPU, which has no second memory to move to."""
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
    """The placement of a frozen model and the JSON of its forward-only engine.

    Args:
        options: the run's options.
        owner: first part of the names of its options, ``ref`` or ``reward``, for messages.
        placement: as asked for; None: as ``deepspeed`` says, or by the machine.
        deepspeed: JSON of its engine: path, packaged name or mapping; None: the packaged one of the placement.
        dtypes: the run's dtype plan; only its compute dtype matters here.
        world_size: number of ranks.
        hidden_size: of this model, for "auto".
        micro_batch: rows of one forward.

    Raises:
        OptionError: stage 1 or 2, anything about an optimizer, or a JSON that contradicts ``placement``.
    """
    if placement is not None and placement not in PLACEMENTS:
        raise OptionError(f"{owner}_placement={placement!r}: it has no engine; set one of {', '.join(PLACEMENTS)}")
    if deepspeed is not None:
        base = load_deepspeed_config(deepspeed, "")
    else:
        base = load_deepspeed_config(None, PLACEMENTS[placement or default_placement(options)].settings)
    where = source_of(base)
    config, stage = checked_copy(base, where)
    found = _checked_placement(config, stage, where)
    if placement is not None and placement != found:
        raise OptionError(
            f"{where}: zero_optimization.stage={stage} is the placement {found!r}, which contradicts "
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
    """What the JSON of a frozen engine has to say, by dotted path, each with the reason."""
    why = "a frozen engine takes no optimizer step"
    return {
        "train_micro_batch_size_per_gpu": (micro_batch, f"a forward of {micro_batch} rows"),
        "gradient_accumulation_steps": (1, why),
        "train_batch_size": (micro_batch * world_size, f"a forward of {micro_batch} rows x {world_size} ranks"),
        "gradient_clipping": (0.0, why),
        "bf16.enabled": (dtypes.ds["bf16"]["enabled"], f"computing in {dtypes.compute}"),
        "fp16.enabled": (dtypes.ds["fp16"]["enabled"], f"computing in {dtypes.compute}"),
    }


def _checked_placement(config: dict[str, Any], stage: int, where: str) -> str:
    """The placement of a JSON that a frozen engine can have; what says nothing about it is removed."""
    if stage in (1, 2):
        raise OptionError(
            f"{where}: zero_optimization.stage={stage}: a frozen engine is stage 3 or 0; set 3, or 0 for a replica"
        )
    if offload_device(config, "offload_optimizer", where) != "none":
        raise OptionError(
            f"{where}: zero_optimization.offload_optimizer.device='cpu': a frozen engine has no optimizer; remove it"
        )
    check_param_offload(config, stage, where)
    config["zero_optimization"].pop("offload_optimizer", None)
    return placement_of(config)
