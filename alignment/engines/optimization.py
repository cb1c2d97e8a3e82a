"""Optimizer and transformers schedule for the policy, from the options."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from alignment.config.conversion import parse_optim_args
from alignment.config.errors import OptionError
from alignment.engines.optimizers import optimizer_kind
from alignment.internals.transformers import parameter_names_outside

if TYPE_CHECKING:
    from alignment.config.options import AlignmentConfig

# The names that transformers' Trainer exempts from weight decay.
_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: decayed, and biases and norms, which are not."""
    decayed = set(parameter_names_outside(model, [nn.LayerNorm], _NO_DECAY))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, options: AlignmentConfig) -> Optimizer:
    """The optimizer that ``optim`` names, over the trainable parameters of ``model``.

    Raises:
        OptionError: ``optim_args`` has a key or value that the optimizer does not take, or nothing is trainable.
    """
    extra = parse_optim_args(options.optim_args)
    if "weight_decay" in extra:  # the groups have their own, so this one would do nothing
        raise OptionError(f"optim_args: {options.optim_args!r} has weight_decay; set the option weight_decay instead")
    groups = parameter_groups(model, options.weight_decay)
    if not groups:
        raise OptionError("model: no parameter requires a gradient, so there is nothing to train")
    kind, _ = optimizer_kind(options)
    for name in kind.ignored:
        if name in extra:
            raise OptionError(
                f"optim_args: {options.optim_args!r}: {options.optim} does nothing with {name}; remove it"
            )
    own = {"betas": (options.adam_beta1, options.adam_beta2), "eps": options.adam_epsilon} if kind.adam else {}
    try:
        return kind.load()(groups, lr=options.learning_rate, **(kind.arguments | own | extra))
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"optim_args: {options.optim_args!r} does not suit optim {options.optim!r}: {error}"
        ) from error


def check_optimization(options: AlignmentConfig, steps: int) -> str | None:
    """Build optimizer and schedule once over two numbers, so that a wrong argument is named before a model is loaded.

    An optimizer that has to be compiled is compiled here.

    Returns:
        A sentence for the user where another optimizer takes the place of the one that was named, else None.

    Raises:
        OptionError: as :func:`build_optimizer` and :func:`build_scheduler`.
    """
    build_scheduler(build_optimizer(nn.LayerNorm(1), options), options, steps)
    return optimizer_kind(options)[1]


def build_scheduler(optimizer: Optimizer, options: AlignmentConfig, steps: int) -> LRScheduler:
    """transformers' schedule over ``steps`` optimizer steps.

    Raises:
        OptionError: ``lr_scheduler_kwargs`` does not suit the schedule.
    """
    warmup = options.warmup_steps or math.ceil(steps * options.warmup_ratio)
    try:
        return get_scheduler(
            options.lr_scheduler_type,
            optimizer,
            num_warmup_steps=warmup,
            num_training_steps=steps,
            scheduler_specific_kwargs=options.lr_scheduler_kwargs or {},
        )
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"lr_scheduler_type {options.lr_scheduler_type!r} with lr_scheduler_kwargs "
            f"{options.lr_scheduler_kwargs!r}: {error}"
        ) from error
