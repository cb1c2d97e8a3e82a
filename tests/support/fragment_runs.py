"""Training engines with a tiny model whose steps only depend on seeds: on one rank, on two ranks, after a restart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator
from safetensors.torch import save_file
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, LlamaConfig

from alignment import CPOConfig
from alignment.checkpoint.engine_state import ScheduleState
from alignment.checkpoint.fragments import ExportedTensor
from alignment.checkpoint.optimizer_state import (
    group_settings,
    read_fragments,
    restore_group_settings,
    trained_names,
    write_fragments,
)
from alignment.checkpoint.saving import gathered_state_dict
from alignment.config.deepspeed import policy_config
from alignment.config.dtypes import plan_dtypes
from alignment.data.batching import Batch, collate
from alignment.engines.optimizers import build_optimizer, parameter_groups
from alignment.engines.scoring import PolicyEngine
from alignment.internals.deepspeed_state import (
    counters,
    inner_optimizer,
    loss_scale_state,
    replicates_state,
    set_counters,
    set_loss_scale_state,
    state_units,
    whole_shape,
)
from alignment.models.tasks import CAUSAL_LM
from support.helpers import POSITIONS, zero

LAYERS = {
    "stage0": zero(0),
    "stage1": zero(1),
    "stage2": zero(2),
    "stage3": zero(3),
    "stage2-offload": zero(2, optimizer=True),
    "stage3-offload": zero(3, optimizer=True, parameters=True),
    "stage2-round-robin": zero(2),
    "stage3-sub-groups": zero(3),
}
# These two are for bf16 only: fp32 accumulation at stage 1 has a separate class.
BF16_LAYERS = {"stage1-fp32-accumulation": zero(1), "stage2-bf16-masters": zero(2)}
BF16_LAYERS["stage1-fp32-accumulation"]["data_types"] = {"grad_accum_dtype": "fp32"}
for _stage in ("stage2", "stage2-offload"):
    BF16_LAYERS[f"{_stage}-fp32-accumulation"] = {**LAYERS[_stage], "data_types": {"grad_accum_dtype": "fp32"}}
BF16_LAYERS["stage2-bf16-masters"]["bf16"] = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
LAYERS["stage2-round-robin"]["zero_optimization"]["round_robin_gradients"] = True
LAYERS["stage3-sub-groups"]["zero_optimization"]["sub_group_size"] = 3000


class Case(NamedTuple):
    """An engine: a key of ``LAYERS`` or ``BF16_LAYERS``, a number format, and what is frozen or exported.

    The optimizer is one of ``optim``, with ``optim_args`` after a colon, or one of torch's such as ``torch.NAdam``.
    """

    layout: str = "stage2"
    dtype: str = "fp32"
    optim: str = "adamw_torch"
    frozen: bool = False
    exported: bool = False
    partly: bool = False

    @classmethod
    def of(cls, text: str) -> Case:
        """Parse ``stage2/bf16/adamw_8bit``, optionally followed by ``frozen``, ``exported`` or ``exported/partly``."""
        layout, dtype, optim, *more = text.split("/")
        return cls(layout, dtype, optim, *(word in more for word in ("frozen", "exported", "partly")))


@contextlib.contextmanager
def fp16_on_cpu() -> Iterator[None]:
    """Allow fp16 on CPUs, which DeepSpeed rejects because it is slow."""
    accelerator, dtypes = get_accelerator(), [torch.float32, torch.bfloat16, torch.float16]
    with (
        mock.patch.object(accelerator, "is_fp16_supported", lambda: True),
        mock.patch.object(accelerator, "supported_dtypes", lambda: dtypes),
    ):
        yield


def config(case: Case, out: Path) -> tuple[CPOConfig, dict[str, Any], torch.dtype]:
    """Return options, the engine's configuration, and the dtype of the weights."""
    name, _, arguments = case.optim.partition(":")
    name = "adamw_torch" if name.startswith("torch.") else name
    options = CPOConfig(
        output_dir=str(out),
        optim=name,
        optim_args=arguments or None,
        learning_rate=0.05 if name == "sgd" else 3e-3,
        weight_decay=0.1,
        bf16=case.dtype == "bf16",
        fp16=case.dtype == "fp16",
    )
    base = (LAYERS | BF16_LAYERS)[case.layout]
    dtypes = plan_dtypes(options, base)
    made = policy_config(options, base, dtypes, torch.distributed.get_world_size(), 32)
    if case.dtype == "fp16":
        made["fp16"] |= {"initial_scale_power": 12, "loss_scale_window": 3}
    return options, made, getattr(torch, dtypes.compute)


def tiny_model(seed: int, dtype: torch.dtype, frozen: bool = False) -> Any:
    """Two layers of odd sizes. ``seed`` only affects the trained weights; ``frozen`` freezes all but a few weights."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=53,
        hidden_size=27,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=14,
        intermediate_size=45,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "q_proj" in name or "input_layernorm" in name)
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.05)
    return model.to(dtype)


def engine(case: Case, out: Path, seed: int = 0, reduce_once: bool = False) -> PolicyEngine:
    """Create a training engine whose parameters decay or not, with an increasing learning rate."""
    options, ds_config, dtype = config(case, out)
    scorer = CAUSAL_LM.scorer(tiny_model(seed, dtype, case.frozen), False)
    library, _, name = case.optim.rpartition(".")
    if library == "torch":
        optimizer = getattr(torch.optim, name)(parameter_groups(scorer, 0.1), lr=3e-3)
    else:
        optimizer = build_optimizer(scorer, options)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
    return PolicyEngine(scorer, ds_config, optimizer, schedule, reduce_once)


def one_row(seed: int) -> Batch:
    """Return a batch of one random row."""
    row = torch.randint(2, 53, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
    return collate([(row[:3], row[3:])], 20)


def train(policy: PolicyEngine, first: int, steps: int) -> list[float]:
    """Run steps ``first`` to ``first + steps``, each with its own batch; all ranks have equal shares of the loss."""
    norms = []
    for number in range(first, first + steps):
        generator = torch.Generator().manual_seed(number)
        rows = [torch.randint(2, 53, (9,), generator=generator).tolist() for _ in range(3)]
        batch = collate([(row[:3], row[3:]) for row in rows], 20)
        scores = policy.forward(batch).scores
        policy.backward(-scores.sum() / (18 * policy.world_size), last=True)
        norms.append(policy.step())
    return norms


def save(policy: PolicyEngine, folder: Path, exported: bool = False, partly: bool = False) -> dict[str, Any]:
    """Write the fragments, and return the values that are stored as JSON."""
    places = export(policy, folder) if exported else {}
    if partly:
        places = {name: place for name, place in places.items() if "layers.1" not in name}
    write_fragments(policy, folder, places)
    torch.distributed.barrier()
    return {
        "groups": group_settings(policy),
        "scale": loss_scale_state(policy.engine),
        "counters": counters(policy.engine),
        "schedule": ScheduleState(policy.scheduler).state_dict(),
        "exported": {name: tuple(place) for name, place in places.items()},
    }


def export(policy: PolicyEngine, folder: Path) -> dict[str, ExportedTensor]:
    """Write the model as used for computation; return the parameters that are in fp32."""
    state = gathered_state_dict(policy.scorer.model, keep=True)
    if torch.distributed.get_rank() == 0:
        save_file({f"saved.{name}": tensor for name, tensor in state.items()}, folder / "model.safetensors")
    names = [name for name, tensor in state.items() if tensor.dtype == torch.float32]
    return {name: ExportedTensor("model.safetensors", f"saved.{name}") for name in names}


def restore(policy: PolicyEngine, folder: Path, beside: dict[str, Any]) -> None:
    """Resume from the files written by :func:`save`."""
    places = {name: ExportedTensor(*place) for name, place in beside["exported"].items()}
    read_fragments(policy, folder, exported=places)
    restore_group_settings(policy, beside["groups"])
    set_loss_scale_state(policy.engine, beside["scale"])
    set_counters(policy.engine, beside["counters"])
    ScheduleState(policy.scheduler).load_state_dict(beside["schedule"])


def everything(policy: PolicyEngine) -> dict[str, Tensor]:
    """Return copies of a rank's state: master weights, optimizer states, and the full weights.

    Padding is excluded: DeepSpeed does not initialize it at stage 3, and master weights in model files have none.
    """
    found = {}
    optimizer = inner_optimizer(policy.engine)
    for number, unit in enumerate(state_units(policy.engine)):
        used = torch.zeros(unit.master.numel(), dtype=torch.bool)
        for piece in unit.pieces:
            used[piece.offset : piece.offset + piece.numel] = True
        for name, value in {"master": unit.master, **optimizer.state.get(unit.master, {})}.items():
            value = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
            found[f"{number}.{name}"] = (
                value.reshape(-1)[used] if value.is_floating_point() and value.numel() == len(used) else value.clone()
            )
    weights = gathered_state_dict(policy.scorer.model, keep=True)
    return found | {f"weight.{name}": tensor for name, tensor in weights.items()}


def masters(policy: PolicyEngine) -> dict[str, Tensor]:
    """Return the full master weights by name; collective."""
    names = trained_names(policy.scorer.model)
    found = {
        name: torch.zeros(whole_shape(parameter), dtype=torch.float32).view(-1) for parameter, name in names.items()
    }
    for unit in state_units(policy.engine):
        for parameter, start, offset, numel in unit.pieces:
            part = unit.master.detach().reshape(-1)[offset : offset + numel]
            found[names[parameter]][start : start + numel] = part
    if not replicates_state(policy.engine):
        for whole in found.values():
            torch.distributed.all_reduce(whole)
    return found


def continued(case: Case, folder: Path, first: int, steps: int) -> list[str]:
    """Return the bitwise differences between a run that was interrupted after ``first`` steps and one that was not."""
    folder.mkdir(exist_ok=True)
    policy = engine(case, folder)
    train(policy, 0, first)
    beside = save(policy, folder, case.exported, case.partly)
    norms = train(policy, first, steps)
    wanted, counted, scale = everything(policy), counters(policy.engine), loss_scale_state(policy.engine)
    policy.close()
    policy = engine(case, folder, seed=1)
    restore(policy, folder, beside)
    found = [] if train(policy, first, steps) == norms else ["norms"]
    found += differences(everything(policy), wanted)
    if (counters(policy.engine), loss_scale_state(policy.engine)) != (counted, scale):
        found.append("counters")
    policy.close()
    return found


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the relative difference of two updates."""
    off = sum(float((found[name] - wanted[name]).square().sum()) for name in wanted)
    return float((off / sum(float(update.square().sum()) for update in wanted.values())) ** 0.5)


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that are not bitwise equal."""
    equal = {
        name
        for name in found.keys() & wanted.keys()
        if found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name])
    }
    return sorted((found.keys() | wanted.keys()) - equal)
