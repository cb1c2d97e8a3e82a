"""Optimizers by name (torch's, bitsandbytes', DeepSpeed's compiled ones, Adafactor) and transformers' schedules."""

from __future__ import annotations

import importlib
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils import cpp_extension
from transformers import get_scheduler

from alignment.config.dtypes import planned, uses_cuda
from alignment.config.elsewhere import has_optimizer
from alignment.config.errors import OptionError
from alignment.config.fields import keywords, parse_optim_args
from alignment.engines.host import compiling
from alignment.internals.bitsandbytes import counts_in_32_bits, is_paged, stores_8_bits
from alignment.internals.deepspeed import is_prebuilt
from alignment.internals.deepspeed_state import Unit, inner_optimizer, state_units, whole_shape
from alignment.internals.torch import has_cuda_compiler
from alignment.internals.transformers import parameter_names_outside

if TYPE_CHECKING:
    from alignment.config.options import AlignmentConfig


_MOST_32_BITS = 2**31 - 1
_SLOWEST = 0.9999  # decay of AdEMAMix's slow average, as in transformers
_BLOCK = 256  # number of 8-bit values that share one 32-bit scale
_SMALL = 4096  # tensors with fewer elements have 32-bit states in an 8-bit optimizer
GROUP = 50_000_000  # elements: ZeRO-1 and 2 copy the gradients of one group at a time, and twice, while they step
# The names that transformers' Trainer exempts from weight decay.
_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


@dataclass(frozen=True)
class OptimizerKind:
    """The class of an optimizer and its fixed arguments.

    Attributes:
        home: module and class.
        arguments: fixed keyword arguments.
        reads: which of ``adam_beta1`` and ``adam_beta2`` (``betas``) and ``adam_epsilon`` (``eps``) it uses.
        builder: DeepSpeed's name of the op that has to be compiled; None if there is none.
        states: values stored per parameter, in 32 bits or in ``optim_bits``.
        further: arguments that each add one such value.
        scratch: temporary 32-bit copies of the parameters during a step.
    """

    home: tuple[str, str]
    arguments: dict[str, Any]
    reads: tuple[str, ...] = ("betas", "eps")
    builder: str | None = None
    states: int = 2
    further: tuple[str, ...] = ()
    scratch: int = 0

    def values(self, given: Mapping[str, Any]) -> int:
        """Number of values stored per parameter with these arguments."""
        return self.states + sum(bool(given.get(name)) for name in self.further)


# torch's fused kernel needs no temporary copy of the weights, and on a CPU is as fast as DeepSpeed's compiled one.
_FUSED = OptimizerKind(("torch.optim", "AdamW"), {"fused": True}, further=("amsgrad",))


def _bitsandbytes(name: str = "AdamW", **arguments: Any) -> OptimizerKind:
    reads = {"Lion": ("betas",), "RMSprop": ()}.get(name, ("betas", "eps"))
    states = {"Lion": 1, "RMSprop": 1, "AdEMAMix": 3}.get(name, 2)
    return OptimizerKind(("bitsandbytes.optim", name), arguments, reads, states=states)


KINDS: dict[str, OptimizerKind] = {
    "adamw_torch": _FUSED,
    "adamw_torch_fused": _FUSED,
    "adamw_8bit": _bitsandbytes(optim_bits=8),
    "adamw_bnb_8bit": _bitsandbytes(optim_bits=8),
    "paged_adamw_8bit": _bitsandbytes(optim_bits=8, is_paged=True),
    "paged_adamw_32bit": _bitsandbytes(optim_bits=32, is_paged=True),
    "lion_8bit": _bitsandbytes("Lion", optim_bits=8),
    "lion_32bit": _bitsandbytes("Lion", optim_bits=32),
    "paged_lion_8bit": _bitsandbytes("Lion", optim_bits=8, is_paged=True),
    "paged_lion_32bit": _bitsandbytes("Lion", optim_bits=32, is_paged=True),
    "ademamix": _bitsandbytes("AdEMAMix", optim_bits=32),
    "ademamix_8bit": _bitsandbytes("AdEMAMix", optim_bits=8),
    "paged_ademamix_8bit": _bitsandbytes("AdEMAMix", optim_bits=8, is_paged=True),
    "paged_ademamix_32bit": _bitsandbytes("AdEMAMix", optim_bits=32, is_paged=True),
    "rmsprop_bnb": _bitsandbytes("RMSprop", optim_bits=32),
    "rmsprop_bnb_8bit": _bitsandbytes("RMSprop", optim_bits=8),
    "rmsprop_bnb_32bit": _bitsandbytes("RMSprop", optim_bits=32),
    "deepspeed_cpu_adam": OptimizerKind(
        ("deepspeed.ops.adam", "DeepSpeedCPUAdam"), {"adamw_mode": True}, builder="CPUAdamBuilder"
    ),
    "deepspeed_fused_adam": OptimizerKind(
        ("deepspeed.ops.adam", "FusedAdam"), {"adam_w_mode": True}, builder="FusedAdamBuilder"
    ),
    "sgd": OptimizerKind(("torch.optim", "SGD"), {}, reads=(), states=0, further=("momentum",), scratch=1),
    "rmsprop": OptimizerKind(
        ("torch.optim", "RMSprop"), {}, reads=(), states=1, further=("momentum", "centered"), scratch=2
    ),
    # With the learning rate of the schedule, as in transformers' Trainer.
    "adafactor": OptimizerKind(
        ("transformers", "Adafactor"),
        {"scale_parameter": False, "relative_step": False},
        reads=(),
        states=0,  # rows and columns of matrices
        further=("beta1",),
    ),
}


def step_bytes(options: AlignmentConfig) -> float:
    """Bytes per trained parameter of the optimizer's states and temporary copies; 8 for AdamW."""
    kind, _ = optimizer_kind(options)
    each = 1 + 4 / _BLOCK if kind.arguments.get("optim_bits") == 8 else 4
    return kind.values(parse_optim_args(options.optim_args)) * each + 4 * kind.scratch


def bytes_to_come(engine: Any, device: torch.device | None = None) -> int:
    """Bytes of the states that this rank's optimizer will create at its first step; 0 after it.

    An optimizer that is not in :data:`KINDS` is assumed to store two values per parameter, like AdamW. With a
    ``device``, only what will be on it is counted: the states of master weights in host memory are there, and those of
    a paged optimizer leave a GPU when memory is needed.
    """
    if engine.optimizer is None or not hasattr(engine.optimizer, "param_groups"):
        return 0  # an inference engine
    optimizer = inner_optimizer(engine)
    if device is not None and device.type == "cuda" and is_paged(optimizer):
        return 0
    home = (type(optimizer).__module__.partition(".")[0], type(optimizer).__name__)
    known = (kind for kind in KINDS.values() if (kind.home[0].partition(".")[0], kind.home[1]) == home)
    kind, total = next(known, _FUSED), 0.0
    absent = [unit for unit in state_units(engine) if not optimizer.state.get(unit.master)]
    for unit in (unit for unit in absent if device is None or unit.master.device.type == device.type):
        in_8_bits = stores_8_bits(optimizer) and unit.master.numel() >= _SMALL
        each = 1 + 4 / _BLOCK if in_8_bits else unit.master.element_size()
        total += kind.values(optimizer.param_groups[unit.group]) * unit.master.numel() * each
    return int(total)


def missing_to_compile(builder: str, *, cuda: bool) -> str | None:
    """What this machine lacks to compile the op of a DeepSpeed builder; None if nothing, or if the op is prebuilt."""
    if is_prebuilt(builder):
        return None
    if cuda and builder == "FusedAdamBuilder" and not has_cuda_compiler():
        return "the CUDA toolkit (nvcc, located by CUDA_HOME)"
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "a C++ compiler (g++, or the one in CXX)"
    return None if cpp_extension.is_ninja_available() else "ninja (pip install ninja)"


def optimizer_kind(options: AlignmentConfig) -> tuple[OptimizerKind, str | None]:
    """The optimizer that ``optim`` selects or, if it cannot be compiled, torch's with a message that says so."""
    kind = KINDS[options.optim]
    missing = None if kind.builder is None else missing_to_compile(kind.builder, cuda=uses_cuda(options))
    if missing is None:
        return kind, None
    return _FUSED, (
        f"optim: {options.optim} is compiled at first use, but this machine lacks {missing}; using adamw_torch "
        "instead, torch's fused AdamW, which makes the same updates at about the same speed"
    )


def parameter_groups(
    model: nn.Module, weight_decay: float, most: float = math.inf, *, all_decayed: bool = False
) -> list[dict[str, Any]]:
    """Trainable parameters with weight decay, then biases and norms, without unless ``all_decayed``.

    Both are split into groups of at most ``most`` elements, or one larger parameter, identically at every ZeRO stage.
    """
    decayed = set(parameter_names_outside(model, [nn.LayerNorm], _NO_DECAY))
    groups: list[dict[str, Any]] = []
    for decays in (True, False):
        room = -1.0
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and (name in decayed) is decays:
                size = math.prod(whole_shape(parameter))
                if size > room:
                    decay = weight_decay if decays or all_decayed else 0.0
                    groups.append({"params": [], "weight_decay": decay})
                    room = most
                groups[-1]["params"].append(parameter)
                room -= size
    return groups


def check_counts(optimizer: Optimizer, units: Iterable[Unit]) -> None:
    """Reject tensors that are too large for the optimizer's kernels, which would silently not update them.

    Raises:
        OptionError: a tensor is too large; the message gives the sizes.
    """
    largest = max((unit.master.numel() for unit in units), default=0)
    if largest > _MOST_32_BITS and counts_in_32_bits(optimizer):
        raise OptionError(
            f"optim: bitsandbytes' {type(optimizer).__name__} indexes elements with 32 bits, but this rank would have "
            f"to update {largest} elements in one call (maximum: {_MOST_32_BITS}); set optim: adamw_torch, or use "
            "ZeRO-3 with more ranks or a smaller zero_optimization.sub_group_size"
        )


def build_optimizer(model: nn.Module, options: AlignmentConfig, *, offloaded: bool = False) -> Optimizer:
    """Build the optimizer that ``optim`` selects for the trainable parameters of ``model``.

    Groups whose states are ``offloaded`` to host memory are not split: their gradients are there too, and each has
    page-locked blocks of its own, which torch before 2.13 rounds up to powers of two.

    Raises:
        OptionError: ``optim_args`` has a key or value that the optimizer does not accept, or nothing is trainable.
    """
    extra = parse_optim_args(options.optim_args)
    if "weight_decay" in extra:  # the groups have their own values, so this one would have no effect
        raise OptionError(f"optim_args: {options.optim_args!r} has weight_decay; set the option weight_decay instead")
    kind, _ = optimizer_kind(options)
    blockwise = kind.home[0].startswith("bitsandbytes")
    most = math.inf if offloaded and not blockwise else GROUP
    groups = parameter_groups(model, options.weight_decay, most, all_decayed=has_optimizer(options.deepspeed))
    if not groups:
        raise OptionError("model: no parameter requires a gradient, so there is nothing to train")
    if blockwise and "amsgrad" in extra:
        raise OptionError(f"optim_args: {options.optim_args!r}: {options.optim} ignores amsgrad; remove it")
    own: dict[str, Any] = {"betas": (options.adam_beta1, options.adam_beta2), "eps": options.adam_epsilon}
    own = {name: value for name, value in own.items() if name in kind.reads}
    if kind.home[1] == "AdEMAMix":  # transformers' names for the decays of its three averages
        decays = zip(("beta1", "beta2", "beta3"), (*own["betas"], _SLOWEST))
        own["betas"] = tuple(extra.pop(name, decay) for name, decay in decays)
    try:
        with compiling():
            make: Callable[..., Optimizer] = getattr(importlib.import_module(kind.home[0]), kind.home[1])
            return make(groups, lr=options.learning_rate, **(kind.arguments | own | extra))
    except (TypeError, ValueError, NotImplementedError) as error:
        raise OptionError(
            f"optim_args: {options.optim_args!r} is not valid for optim {options.optim!r}: {error}"
        ) from error


def check_optimization(options: AlignmentConfig, steps: int) -> str | None:
    """Build optimizer and schedule once for two values, so that a wrong argument is found before a model is loaded.

    An optimizer that needs compilation is compiled here, but not for another machine, whose processor may differ.
    Returns a message for the user if another optimizer replaces the selected one.

    Raises:
        OptionError: as for :func:`build_optimizer` and :func:`build_scheduler`.
    """
    model = nn.LayerNorm(1)
    elsewhere = planned() is not None and KINDS[options.optim].builder is not None
    build_scheduler(SGD(model.parameters()) if elsewhere else build_optimizer(model, options), options, steps)
    return None if elsewhere else optimizer_kind(options)[1]


def build_scheduler(optimizer: Optimizer, options: AlignmentConfig, steps: int) -> LRScheduler:
    """transformers' schedule over ``steps`` optimizer steps.

    Raises:
        OptionError: ``lr_scheduler_kwargs`` is not valid for the schedule.
    """
    warmup = options.get_warmup_steps(steps)
    arguments = dict(keywords(options.lr_scheduler_kwargs))
    by_logarithm = arguments.get("warmup_type") == "log"  # the default of DeepSpeed's schedules; not in transformers
    if by_logarithm:
        del arguments["warmup_type"]
    try:
        schedule: LRScheduler = get_scheduler(
            options.lr_scheduler_type,
            optimizer,
            num_warmup_steps=warmup,
            num_training_steps=steps,
            scheduler_specific_kwargs=arguments,
        )
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"lr_scheduler_type {options.lr_scheduler_type!r} with lr_scheduler_kwargs "
            f"{options.lr_scheduler_kwargs!r}: {error}"
        ) from error
    if by_logarithm:
        assert isinstance(schedule, LambdaLR)
        after = schedule.lr_lambdas[0]

        def factor(step: int) -> float:
            return math.log(step + 1) / math.log(max(2, warmup)) if step < warmup else float(after(step))

        schedule.lr_lambdas = [factor] * len(schedule.lr_lambdas)
    return schedule
