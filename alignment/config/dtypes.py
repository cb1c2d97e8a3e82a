"""The dtype plan: compute, master and accumulation formats, decided once and checked before any engine exists.

It depends on the machine of the run, which may be another than the one that plans it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from alignment.config.errors import OptionError, setting

BF16, FP16, FP32 = "bfloat16", "float16", "float32"
_SECTION = {BF16: "bf16", FP16: "fp16"}
SHORT = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
_LONG = {short: long for long, short in SHORT.items()} | {long: long for long in SHORT}
# Below this AdamW's updates vanish in bf16 master weights: they are smaller than half a unit in the last place.
LEAST_RATE_FOR_BF16_MASTERS = 1e-4
_AMPERE, _VOLTA = 8, 7  # major compute capabilities: the first with bf16, the first with fast fp16


@dataclass(frozen=True)
class DtypePlan:
    """Number formats of a run, by torch's names.

    ``compute``: weights and activations in forward and backward. ``master``: the optimizer's copy of the weights.
    ``accumulate``: gradients between micro-batches. ``ds``: the sections of the DeepSpeed JSON that say so.
    ``note``: a line for the user where the GPU is not made for bf16. ``accumulation_is_free``: nobody asked for
    ``accumulate``, and fp32 may take its place where it fits.
    """

    compute: str
    master: str
    accumulate: str
    ds: dict[str, dict[str, Any]] = field(default_factory=dict)
    note: str | None = None
    accumulation_is_free: bool = False


@dataclass(frozen=True)
class Machine:
    """What a plan depends on beside its options.

    Attributes:
        ranks: number of processes.
        cuda: whether each of them has a GPU, which computes in bf16.
    """

    ranks: int
    cuda: bool

    def __str__(self) -> str:
        device = "a GPU each that computes in bf16" if self.cuda else "CPUs"
        return f"{self.ranks} rank(s) with {device}"


_planned: list[Machine] = []


def planned() -> Machine | None:
    """The machine to plan for; None: the one that this process runs on."""
    return _planned[-1] if _planned else None


@contextlib.contextmanager
def planning_for(machine: Machine) -> Iterator[None]:
    """Within this context options are checked, and engines planned, for ``machine``; nothing can be trained."""
    _planned.append(machine)
    try:
        yield
    finally:
        _planned.pop()


def uses_cuda(options: Any) -> bool:
    """Whether this process, or the one that is planned, computes on a CUDA (or ROCm) device."""
    machine = planned()
    if machine is not None:
        return machine.cuda and not options.use_cpu
    if options.use_cpu or os.environ.get("DS_ACCELERATOR", "").lower() == "cpu":
        return False
    import torch

    return torch.cuda.is_available()


def requested_dtype(options: Any) -> str | None:
    """The compute dtype that ``dtype``, ``bf16`` and ``fp16`` ask for; None: left to the machine.

    Raises:
        OptionError: they contradict each other.
    """
    if options.bf16 and options.fp16:
        raise OptionError("bf16=True and fp16=True: only one compute dtype is possible; leave one out")
    if options.dtype in (None, "auto"):
        if options.bf16 or options.fp16:
            return BF16 if options.bf16 else FP16
        return FP32 if options.bf16 is False else None
    for flag, name in (("bf16", BF16), ("fp16", FP16)):
        value = getattr(options, flag)
        if value is not None and value != (options.dtype == name):
            raise OptionError(
                f"{setting('dtype', options.dtype)} and {setting(flag, value)}: they contradict each other; leave one "
                f"out (master weights are fp32 under either)"
            )
    return str(options.dtype)


def compute_dtype(options: Any) -> str:
    """The compute dtype of these options on the machine of the run, without a DeepSpeed JSON."""
    requested = requested_dtype(options)
    if requested is not None:
        return requested
    if not uses_cuda(options):
        return FP32
    if planned() is not None or computes_bf16():
        return BF16
    return FP16 if options.fp16 is not False and computes_fp16() else FP32


def computes_bf16() -> bool:
    """Whether every GPU that this host's ranks compute on computes in bf16 itself.

    Others, such as Turing's (RTX 20, T4) and Volta's, emulate it in fp32, several times slower than they are at fp16.
    A host may have both kinds, and all ranks have to decide alike; a card that no rank uses, such as that of the
    display, has no say.
    """
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False) and all(
        torch.cuda.get_device_capability(card)[0] >= _AMPERE for card in _used_cards()
    )


def computes_fp16() -> bool:
    """Whether every GPU in use here is fast at fp16, as DeepSpeed asks for it too: Volta's and newer ones."""
    import torch

    return all(torch.cuda.get_device_capability(card)[0] >= _VOLTA for card in _used_cards())


def _used_cards() -> range:
    """The GPUs of this host's ranks, which take them by local rank."""
    import torch

    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    return range(min(torch.cuda.device_count(), int(ranks) if ranks.isdecimal() else 1))


def _note(options: Any, compute: str, asked: bool) -> str | None:
    """What is to be said of a GPU that only emulates bf16."""
    if planned() is not None or not uses_cuda(options) or computes_bf16():
        return None
    import torch

    name = torch.cuda.get_device_name()
    if compute == BF16:
        return (
            f"bf16: {name} does not compute in bf16 but emulates it, which is slow; leave bf16 out, and fp16 is taken"
        )
    if asked:
        return None
    if compute == FP32:
        return f"fp32: {name} does not compute in bf16, and fp16 is ruled out or slow there, so this run is in fp32"
    return (
        f"fp16: {name} does not compute in bf16, so this run computes in fp16, with fp32 masters and a dynamic loss "
        "scale; set dtype: float32 or bf16: true for another format"
    )


def _explicit(ds_config: dict[str, Any], section: str, key: str = "enabled") -> Any:
    """A value of a section of the JSON; None where it is absent or "auto"."""
    value = ds_config.get(section) or {}
    if not isinstance(value, dict):
        raise OptionError(f"{section}={value!r} in the DeepSpeed JSON: expected a mapping, such as {{{key!r}: …}}")
    value = value.get(key)
    if key == "enabled" and value not in (None, "auto") and not isinstance(value, bool):
        raise OptionError(f'{section}.enabled={value!r} in the DeepSpeed JSON: set true, false or "auto"')
    return None if value == "auto" else value


def check_against_json(compute: str, source: str, ds_config: dict[str, Any]) -> None:
    """Raise :class:`OptionError`, naming both sides, when the JSON sets bf16 or fp16 otherwise than ``compute``."""
    for name, section in _SECTION.items():
        enabled = _explicit(ds_config, section)
        if enabled is not None and enabled != (compute == name):
            raise OptionError(
                f"{section}.enabled={str(enabled).lower()} in the DeepSpeed JSON contradicts {source} (computing in "
                f'{compute}); set it to "auto" or change one of them'
            )


def _source(options: Any) -> str:
    """The option that asks for the compute dtype."""
    for name in ("bf16", "fp16"):
        if getattr(options, name):
            return setting(name, True)
    return setting("dtype", options.dtype) if options.dtype not in (None, "auto") else setting("bf16", options.bf16)


def _compute(options: Any, ds_config: dict[str, Any]) -> str:
    """The compute dtype of options and JSON together; the JSON decides where the options do not."""
    requested = requested_dtype(options)
    if requested is not None:
        check_against_json(requested, _source(options), ds_config)
        return requested
    bf16, fp16 = _explicit(ds_config, "bf16"), _explicit(ds_config, "fp16")
    if bf16 and fp16:
        raise OptionError("bf16.enabled=true and fp16.enabled=true in the DeepSpeed JSON: leave one out")
    if fp16 and options.fp16 is False:
        raise OptionError("fp16.enabled=true in the DeepSpeed JSON contradicts fp16=False; leave one of them out")
    if bf16 or fp16:
        return BF16 if bf16 else FP16
    compute = compute_dtype(options)
    refused = (compute == BF16 and bf16 is False) or (compute == FP16 and fp16 is False)
    return FP32 if refused else compute


def _accumulate(compute: str, stage: Any, ds_config: dict[str, Any]) -> str:
    """The format of accumulated gradients: DeepSpeed's default is the compute dtype."""
    value = _explicit(ds_config, "data_types", "grad_accum_dtype")
    if value is None:
        return compute
    accumulate = _LONG.get(value) if isinstance(value, str) else None
    if accumulate not in (compute, FP32):
        raise OptionError(
            f"data_types.grad_accum_dtype={value!r} in the DeepSpeed JSON: while computing in {compute}, set "
            f'"{SHORT[compute]}", "fp32" or "auto"'
        )
    if stage == 0 and accumulate != compute:
        raise OptionError(
            f"data_types.grad_accum_dtype={value!r} in the DeepSpeed JSON: ZeRO stage 0 accumulates in the compute "
            f"dtype ({compute}) only; set zero_optimization.stage to 2 or 3"
        )
    return accumulate


def _master(compute: str, stage: Any, options: Any, ds_config: dict[str, Any]) -> str:
    """The format of the master weights: fp32 unless the JSON asks for bf16 and that can train."""
    if _explicit(ds_config, "fp16", "fp16_master_weights_and_grads"):
        raise OptionError(
            "fp16.fp16_master_weights_and_grads=true in the DeepSpeed JSON: it needs DeepSpeed's CPU Adam, which is "
            "not supported yet; remove it (masters are fp32)"
        )
    bf16_states = _explicit(ds_config, "bf16", "bf16_optimizer_states")
    if not _explicit(ds_config, "bf16", "bf16_master_weights_and_grads"):
        if bf16_states:
            raise OptionError(
                "bf16.bf16_optimizer_states=true in the DeepSpeed JSON: it needs bf16_master_weights_and_grads; "
                "remove it"
            )
        return FP32
    key = "bf16.bf16_master_weights_and_grads=true in the DeepSpeed JSON"
    if compute != BF16 or stage == 0:
        raise OptionError(f"{key}: it needs bf16=True and ZeRO stage 1, 2 or 3; remove it (masters are fp32)")
    if options.learning_rate < LEAST_RATE_FOR_BF16_MASTERS:
        raise OptionError(
            f"{key} with {setting('learning_rate', options.learning_rate)}: bf16 masters lose every update smaller "
            f"than about 2^-9 of the weight, so that below {LEAST_RATE_FOR_BF16_MASTERS:g} almost nothing trains; "
            "remove it"
        )
    if not bf16_states or _explicit(ds_config, "zero_optimization", "offload_optimizer"):
        raise OptionError(
            f"{key}: with fp32 or offloaded optimizer states it needs DeepSpeed's CPU Adam, which is not supported "
            f"yet; set bf16.bf16_optimizer_states without offload_optimizer, or remove it"
        )
    return BF16


def _check_fp16_supported(source: str) -> None:
    machine = planned()
    if machine is not None and machine.cuda:
        return
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if not accelerator.is_fp16_supported():
        raise OptionError(
            f"{source}: the accelerator {accelerator.device_name()!r} does not support fp16; set bf16=true or "
            f"dtype=float32"
        )


def plan_dtypes(options: Any, ds_config: dict[str, Any]) -> DtypePlan:
    """Decide every number format of a run.

    Args:
        options: the run's options.
        ds_config: the policy's DeepSpeed JSON as the user wrote it; not changed.

    Raises:
        OptionError: options and JSON contradict each other, or the combination cannot train.
    """
    compute = _compute(options, ds_config)
    asked = requested_dtype(options) is not None or bool(_explicit(ds_config, "fp16"))
    if compute == FP16:
        _check_fp16_supported(_source(options) if requested_dtype(options) else "fp16.enabled=true")
    stage = _explicit(ds_config, "zero_optimization", "stage") or 0
    master = _master(compute, stage, options, ds_config)
    accumulate = _accumulate(compute, stage, ds_config)
    sections: dict[str, dict[str, Any]] = {
        "bf16": {"enabled": compute == BF16},
        "fp16": {"enabled": compute == FP16},
        "data_types": {"grad_accum_dtype": SHORT[accumulate]},
    }
    free = _explicit(ds_config, "data_types", "grad_accum_dtype") is None and master == FP32
    return DtypePlan(compute, master, accumulate, sections, _note(options, compute, asked), free)
