"""Placements of frozen models (references and reward models), and the DeepSpeed JSON of each.

A placement is requested by name, determined by a DeepSpeed JSON of the model, or chosen automatically.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alignment.config.deepspeed import (
    Fixed,
    Situation,
    checked_copy,
    finished,
    load_deepspeed_config,
    offload_device,
    source_of,
)
from alignment.config.deepspeed_keys import value_at
from alignment.config.dtypes import DtypePlan, uses_cuda
from alignment.config.errors import OptionError, counted, listing


@dataclass(frozen=True)
class Placement:
    """A placement of a frozen model.

    Attributes:
        name: value of the option.
        settings: name of the packaged DeepSpeed JSON of its engine.
        cost: template of a text with the memory that it takes.
    """

    name: str
    settings: str
    cost: str

    def describe(self, size: str, ranks: int) -> str:
        """Describe the placement and its cost."""
        return f"{self.name} ({self.cost.format(size=size, ranks=counted(ranks, 'rank'))})"


PLACEMENTS = {
    name: Placement(name, f"ref_{name}", cost)
    for name, cost in (
        ("offload", "{size} bytes per parameter in host memory, sharded over {ranks}"),
        ("sharded", "{size} bytes per parameter, sharded over the devices of {ranks}"),
        ("replica", "{size} bytes per parameter on every device"),
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
    layer: int = 0,
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
        layer: number of elements of its largest decoder layer, for "auto"; 0 if it is unknown.

    Raises:
        OptionError: ZeRO stage 1 or 2, an optimizer offload, or a JSON that contradicts ``placement``.
    """
    if placement is not None and placement not in PLACEMENTS:
        raise OptionError(f"{owner}_placement={placement!r}: expected one of {listing(PLACEMENTS)}")
    pin = uses_cuda(options)
    # CPUs have one memory, so offloading would not save any.
    default = PLACEMENTS[placement or ("offload" if pin else "replica")].settings
    base = load_deepspeed_config(deepspeed, default)
    where = source_of(base)
    config, stage = checked_copy(base, where)
    zero = config["zero_optimization"]
    if stage in (1, 2):
        raise OptionError(f"{where}: zero_optimization.stage={stage}: a frozen model requires stage 3, or 0; set 3")
    if value_at(zero, "offload_optimizer.device") not in (None, "none"):
        raise OptionError(f"{where}: zero_optimization.offload_optimizer: a frozen model has no optimizer; remove it")
    offload_device(config, "offload_param", stage, where)
    found = placement_of(config)
    if placement not in (None, found):
        raise OptionError(
            f"{where}: zero_optimization.stage={stage} (placement {found!r}) contradicts "
            f"{owner}_placement={placement!r}; change one of them"
        )
    for section in ("offload_optimizer", "offload_param"):
        if section == "offload_param" and found == "offload":
            zero[section].setdefault("pin_memory", pin)
        else:
            zero.pop(section, None)
    why, rows = "an engine without optimizer steps", f"a micro-batch of {micro_batch} rows"
    fixed: Fixed = {
        "train_micro_batch_size_per_gpu": (micro_batch, rows),
        "gradient_accumulation_steps": (1, why),
        "train_batch_size": (micro_batch * world_size, f"{rows} x {world_size} ranks"),
        "gradient_clipping": (0.0, why),
        "bf16.enabled": (dtypes.ds["bf16"]["enabled"], dtypes.reason),
        "fp16.enabled": (dtypes.ds["fp16"]["enabled"], dtypes.reason),
    }
    situation = Situation(hidden_size, stage, pin, layer=layer)
    return FrozenPlan(PLACEMENTS[found], finished(config, fixed, situation, where))
