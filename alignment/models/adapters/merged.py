"""Merge the adapters of a live model into its base, to train new adapters on the merged model.

TRL below 1.0 does so if it gets both a ``PeftModel`` and a ``peft_config``. PEFT merges in the dtype of the base
model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from alignment.config.errors import OptionError, first_line
from alignment.internals.deepspeed_zero3 import is_partitioned
from alignment.models.adapters.record import kind_of, unsupported
from alignment.models.quantization import is_packed

if TYPE_CHECKING:
    from peft import PeftModel


def merge_live(live: PeftModel) -> tuple[PreTrainedModel, str]:
    """Merge the active adapter of ``live`` into its base, in place.

    Returns:
        The model without adapters, and a message for the user.

    Raises:
        OptionError: merging would round quantized weights, or is not supported for these adapters.
    """
    active = list(live.active_adapters)
    name, config = active[0], live.peft_config[active[0]]
    reason = unsupported(config)
    if len(active) > 1:
        reason = f"several are active ({', '.join(active)})"
    elif any(map(is_packed, live.parameters())):
        reason = "the base weights are quantized, and merging would round them"
    elif any(map(is_partitioned, live.parameters())):
        reason = "an earlier run has partitioned the weights (ZeRO-3)"
    try:
        if reason is not None:
            raise ValueError(reason)
        model: PreTrainedModel = live.merge_and_unload(safe_merge=True)
    except (ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise OptionError(
            f"peft_config: the adapters of model cannot be merged: {first_line(error)}; merge them yourself and pass "
            "the merged model, or remove peft_config to continue training them"
        ) from error
    return model, (
        f"model: its {kind_of(config)} adapter {name!r} was merged into the base model in "
        f"{str(model.dtype).removeprefix('torch.')}; others are dropped. The adapters of peft_config are trained on "
        "the merged model and only work with it: save it as well (merge_and_unload() and save_pretrained() before "
        "training)"
    )
