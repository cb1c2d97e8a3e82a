"""Adapters of a live model merged into its base, because new ones are to be trained on both.

TRL below 1.0 does so where a ``PeftModel`` is given with ``peft_config``. PEFT merges, in the dtype of the base.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from alignment.config.errors import OptionError, first_line, listing
from alignment.internals.deepspeed_zero3 import is_partitioned
from alignment.models.adapters.kinds import KINDS
from alignment.models.quantization import is_packed

if TYPE_CHECKING:
    from peft import PeftModel

_INSTEAD = "merge them yourself and pass the merged model, or leave peft_config out to train them further"


def merge_live(live: PeftModel) -> tuple[PreTrainedModel, str]:
    """Merge the active adapter of ``live`` into its base, in place.

    Returns:
        The plain model, and a sentence for the user.

    Raises:
        OptionError: merging would round quantised weights, or is not defined for these adapters.
    """
    _check(live)
    name = live.active_adapters[0]
    kind = str(live.peft_config[name].peft_type.value)
    dropped = sorted(set(live.peft_config) - {name})
    try:
        model: PreTrainedModel = live.merge_and_unload(safe_merge=True)
    except (ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise OptionError(f"peft_config: the adapters of model cannot be merged: {first_line(error)}") from error
    rounded = "" if model.dtype == torch.float32 else f" and rounded to {str(model.dtype).removeprefix('torch.')}"
    gone = f"; {listing(dropped)} of its adapters are dropped" if dropped else ""
    return model, (
        f"model: its {kind} adapter {name!r} is merged into the base{rounded}{gone}. The adapters of peft_config are "
        "trained on the merged model, and belong to it: save that one too (merge_and_unload() and save_pretrained() "
        "before training)"
    )


def _check(live: PeftModel) -> None:
    """Refuse what would not be the same model after merging."""
    active = list(live.active_adapters)
    if len(active) > 1:
        raise OptionError(
            f"peft_config: the adapters {', '.join(active)} of model are all active, and it is not said how to merge "
            f"them; {_INSTEAD}"
        )
    config = live.peft_config[active[0]]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise OptionError(
            f"peft_config: model has {kind} adapters, which change no weight and cannot be merged; leave one of the "
            "two out"
        )
    if kind not in KINDS:
        raise OptionError(f"peft_config: merging {kind} adapters of model has not been tried here; {_INSTEAD}")
    parameters = list(live.parameters())
    if any(map(is_packed, parameters)):
        raise OptionError(
            f"peft_config: the base of model is quantised, and merging its adapters would round them; {_INSTEAD}"
        )
    if any(map(is_partitioned, parameters)):
        raise OptionError(
            f"peft_config: an earlier run has divided the weights of model (ZeRO-3), and divided ones cannot be "
            f"merged; {_INSTEAD}"
        )
