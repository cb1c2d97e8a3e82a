"""The dtype plan: compute, master and accumulation dtypes, decided and checked once before any engine is built.

The plan depends on the machine of the run, which need not be the machine that makes the plan.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from alignment.config.deepspeed_keys import value_at
from alignment.config.errors import OptionError, counted, refuse, setting

BF16, FP16, FP32 = "bfloat16", "float16", "float32"
SHORT = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
# At smaller rates, AdamW's updates are lost in bf16 master weights: they are less than half a unit in the last place.
LEAST_RATE_FOR_BF16_MASTERS = 1e-4
_AMPERE, _VOLTA = 8, 7  # major compute capabilities: the first with bf16, the first with fast fp16


@dataclass(frozen=True)
class DtypePlan:
    """The dtypes of a run, by torch's names."""

    compute: str  # weights and activations in forward and backward passes
    master: str  # the optimizer's copy of the weights
    accumulate: str  # gradients between micro-batches
    ds: dict[str, dict[str, Any]] = field(default_factory=dict)  # the corresponding sections of the DeepSpeed JSON
    note: str | None = None  # a line for the user if the GPU does not support bf16 natively
    accumulation_is_free: bool = False  # not requested, so that fp32 may be used if it fits
    source: str | None = None  # the setting that requests `compute`; None if it depends on the machine

    # What a JSON contradicts that sets another dtype.
    reason = property(lambda self: f"{self.source or 'the default'} (compute dtype {self.compute})")


@dataclass(frozen=True)
class Machine:
    """The machine that a plan is made for."""

    ranks: int
    cuda: bool  # whether each rank has a GPU, with bf16 support
    reads_weights: bool = True  # whether models must have weights, not only a configuration
    card: float | None = None  # bytes of the smallest GPU that a process can use; None: unknown

    def __str__(self) -> str:
        device = "one bf16-capable GPU each" if self.cuda else "CPUs"
        return f"{counted(self.ranks, 'rank')} with {device}"


_planned: list[Machine] = []


def planned() -> Machine | None:
    """Return the machine to plan for, or None for the one that this process runs on."""
    return _planned[-1] if _planned else None


@contextlib.contextmanager
def planning_for(machine: Machine) -> Iterator[None]:
    """Check options and plan engines for ``machine`` within this context, in which nothing can be trained."""
    _planned.append(machine)
    try:
        yield
    finally:
        _planned.pop()


def uses_cuda(options: Any) -> bool:
    """Whether this process, or the machine planned for, computes on a CUDA (or ROCm) device."""
    machine = planned()
    if machine is not None:
        return machine.cuda and not options.use_cpu
    if options.use_cpu or os.environ.get("DS_ACCELERATOR", "").lower() == "cpu":
        return False
    import torch

    return torch.cuda.is_available()


def requested_dtype(options: Any) -> str | None:
    """Return the compute dtype requested by ``dtype``, ``bf16`` and ``fp16``, or None if it depends on the machine.

    Raises:
        OptionError: the options contradict each other.
    """
    flags = {name: getattr(options, SHORT[name]) for name in (BF16, FP16)}
    if all(flags.values()):
        refuse(options, "bf16 fp16", "they contradict each other; remove one of them")
    if options.dtype in (None, "auto"):
        return next((name for name in flags if flags[name]), FP32 if options.bf16 is False else None)
    for name, flag in flags.items():
        if flag is not None and flag != (options.dtype == name):
            both = "they contradict each other; remove one of them (master weights are in fp32 in either case)"
            refuse(options, f"dtype {SHORT[name]}", both)
    return str(options.dtype)


def compute_dtype(options: Any) -> str:
    """Return the compute dtype of these options on the machine of the run, without a DeepSpeed JSON."""
    return _compute(options, {})[0]


def computes_bf16() -> bool:
    """Whether every GPU that this host's ranks use supports bf16 natively.

    Older GPUs, such as Turing (RTX 20, T4) and Volta, emulate bf16 in fp32, several times slower than their fp16. All
    ranks must decide alike on a host with both kinds.
    """
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False) and _generation() >= _AMPERE


def computes_fp16() -> bool:
    """Whether every GPU in use on this host is fast in fp16, which DeepSpeed requires too: Volta and newer."""
    return _generation() >= _VOLTA


def _generation() -> int:
    """Return the least major compute capability of the GPUs in use on this host, one per local rank."""
    import torch

    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    cards = range(min(torch.cuda.device_count(), int(ranks) if ranks.isdecimal() else 1))
    return min(torch.cuda.get_device_capability(card)[0] for card in cards)


def _note(options: Any, compute: str, asked: bool) -> str | None:
    """Return a note for the user if the GPU only emulates bf16."""
    if planned() is not None or not uses_cuda(options) or computes_bf16() or (asked and compute != BF16):
        return None
    import torch

    text = f"{SHORT[compute]}: {torch.cuda.get_device_name()} does not support bf16 natively"
    if compute == BF16:
        return f"{text} and emulates it slowly; remove bf16 to use fp16"
    return f"{text}, so this run computes in {SHORT[compute]}; set dtype: float32 or bf16: true to change this"


def _refuse(key: str, value: Any, why: str) -> NoReturn:
    """Raise :class:`OptionError` for a value of the DeepSpeed JSON."""
    raise OptionError(f"{key}={json.dumps(value)} in the DeepSpeed JSON: {why}")


def _explicit(ds_config: dict[str, Any], path: str) -> Any:
    """Return a value of the JSON, or None if it is absent or "auto"."""
    return None if (value := value_at(ds_config, path)) == "auto" else value


def _compute(options: Any, ds_config: dict[str, Any]) -> tuple[str, str | None]:
    """Return the compute dtype of options and JSON, and the setting that requests it, if any.

    If the JSON contradicts it, its values are refused when they are compared with those of the plan.
    """
    requested = requested_dtype(options)
    if requested is not None:
        name = "dtype" if options.dtype not in (None, "auto") else "fp16" if options.fp16 else "bf16"
        return requested, setting(name, getattr(options, name))
    bf16, fp16 = _explicit(ds_config, "bf16.enabled"), _explicit(ds_config, "fp16.enabled")
    if bf16:
        return BF16, "bf16.enabled=true"
    if fp16 and options.fp16 is not False:
        return FP16, "fp16.enabled=true"
    if not uses_cuda(options):
        return FP32, None
    if planned() is not None or computes_bf16():
        return FP32 if bf16 is False else BF16, None
    allowed = options.fp16 is not False and fp16 is not False
    return FP16 if allowed and computes_fp16() else FP32, None


def _accumulate(compute: str, stage: Any, value: Any) -> str:
    """Return the dtype of accumulated gradients; DeepSpeed's default is the compute dtype."""
    key, short = "data_types.grad_accum_dtype", SHORT[compute]
    if value is None or value in (compute, short):
        return compute
    if value not in (FP32, SHORT[FP32]):
        _refuse(key, value, f'with the compute dtype {compute}, expected "{short}", "fp32" or "auto"')
    if stage == 0:
        _refuse(key, value, f'ZeRO stage 0 supports "{short}" only; set zero_optimization.stage to 2 or 3')
    return FP32


def _master(compute: str, stage: Any, options: Any, ds_config: dict[str, Any]) -> str:
    """Return the dtype of the master weights: fp32, unless the JSON requests bf16 and training is possible in it."""
    key, states = "bf16.bf16_master_weights_and_grads", _explicit(ds_config, "bf16.bf16_optimizer_states")
    if not _explicit(ds_config, key):
        if states:
            _refuse("bf16.bf16_optimizer_states", True, "requires bf16_master_weights_and_grads; remove it")
        return FP32
    if compute != BF16 or stage == 0 or not states or _explicit(ds_config, "zero_optimization.offload_optimizer"):
        why = "requires bf16=True, bf16_optimizer_states and ZeRO stage 1, 2 or 3 without offload_optimizer; remove it"
        _refuse(key, True, why)
    if options.learning_rate < LEAST_RATE_FOR_BF16_MASTERS:
        rate = f"{setting('learning_rate', options.learning_rate)}, below about {LEAST_RATE_FOR_BF16_MASTERS:g}"
        _refuse(key, True, f"bf16 master weights lose updates below 2^-9 of a weight, as with {rate}; remove it")
    return BF16


def _check_fp16_supported(source: str) -> None:
    machine = planned()
    if machine is not None and machine.cuda:
        return
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().is_fp16_supported():
        name = get_accelerator().device_name()
        raise OptionError(f"{source}: the accelerator {name!r} does not support fp16; set bf16=true or dtype=float32")


def plan_dtypes(options: Any, ds_config: dict[str, Any]) -> DtypePlan:
    """Decide all dtypes of a run from its options and the policy's DeepSpeed JSON as the user wrote it.

    Raises:
        OptionError: options and JSON contradict each other, or training is not possible with them.
    """
    compute, source = _compute(options, ds_config)
    if compute == FP16:
        _check_fp16_supported(source or "dtype='auto'")
    stage = _explicit(ds_config, "zero_optimization.stage") or 0
    master = _master(compute, stage, options, ds_config)
    given = _explicit(ds_config, "data_types.grad_accum_dtype")
    accumulate = _accumulate(compute, stage, given)
    sections: dict[str, dict[str, Any]] = {SHORT[name]: {"enabled": compute == name} for name in (BF16, FP16)}
    sections |= {"data_types": {"grad_accum_dtype": SHORT[accumulate]}}
    note = _note(options, compute, source is not None)
    return DtypePlan(compute, master, accumulate, sections, note, given is None and master == FP32, source)
