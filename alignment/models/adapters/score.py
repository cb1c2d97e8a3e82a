"""The head of a reward model with adapters: whether it is trained, and whether a checkpoint contains it.

For configurations made in Python, PEFT's rules apply: a head named in the configuration is trained in full
(``modules_to_save``, or ``task_type="SEQ_CLS"``) or gets an adapter (``target_modules``), and any other head is
frozen. There are two exceptions. A newly initialized head is trained even if the configuration does not name it. A
head that is in no checkpoint is saved with adapters that do not contain it, because they are useless without it. A
live ``PeftModel`` with a new head is used as it was built, with a message: the other layers can learn to produce
rewards along a fixed random direction, so this is not necessarily a mistake.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from alignment.config.errors import ModelError
from alignment.internals.deepspeed_zero3 import is_partitioned
from alignment.models.adapters.kinds import classifies
from alignment.models.classifier import HEAD, HEAD_TENSORS, linear_head
from alignment.models.source import ModelSource
from alignment.models.tasks import is_classifier

_WEIGHTS = "model.safetensors"
_ALL = "all-linear"
_FIX = f"to train it, add it to the configuration: modules_to_save=[{HEAD!r}], or task_type='SEQ_CLS'"


class HeadPlan(NamedTuple):
    """How the head is trained and saved.

    Attributes:
        whole: whether it must be added to ``modules_to_save``.
        kept: whether it is saved with adapters that do not contain it.
        note: a message for the user; empty if the configuration names the head.
    """

    whole: bool = False
    kept: bool = False
    note: str = ""


def plan_new(config: Any, source: ModelSource) -> HeadPlan:
    """Plan the head for new adapters with a configuration made in Python."""
    named = str(getattr(config.task_type, "value", config.task_type)) == "SEQ_CLS"
    if named or is_whole(config):
        return HeadPlan(whole=True)
    held = in_checkpoint(source)
    if is_target(config) and (held or config.target_modules != _ALL):
        note = f"{HEAD}, the head, is not in a checkpoint and gets an adapter; it is saved with the adapters"
        return HeadPlan(kept=not in_checkpoint(source, certain=True), note="" if held else note)
    if held:
        note = f"{HEAD}, the head, comes from {source.name} and is frozen; {_FIX}"
        return HeadPlan(kept=not in_checkpoint(source, certain=True), note=note)
    return HeadPlan(whole=True, note=f"{HEAD}, the head, is not in a checkpoint; it is trained with the adapters")


def plan_live(config: Any, source: ModelSource) -> HeadPlan:
    """Plan the head of a live model that already has adapters."""
    if is_whole(config):
        return HeadPlan()
    if in_checkpoint(source):
        note = f"{HEAD}, the head, comes from {source.name}; the adapters do not include it, so it is frozen; {_FIX}"
        return HeadPlan(note="" if is_target(config) else note)
    if is_target(config):
        return HeadPlan(kept=True, note=f"{HEAD}, the head, is not in a checkpoint; it is saved with the adapters")
    return HeadPlan(
        kept=True,
        note=(
            f"{HEAD}, the head, is not in a checkpoint, and the adapters do not include it; it keeps its random "
            f"initial values and is saved with the adapters; {_FIX}"
        ),
    )


def plan_saved(config: Any, source: ModelSource, path: str, tensors: dict[str, Tensor]) -> HeadPlan:
    """Plan the head for adapters loaded from a folder.

    Raises:
        ModelError: the head for which the adapters were trained is missing.
    """
    if is_whole(config):
        return HeadPlan()
    if any(f"base_model.model.{name}" in tensors for name in HEAD_TENSORS):
        return HeadPlan(kept=True)
    if not in_checkpoint(source):
        raise ModelError(
            f"adapter_name_or_path: neither the adapters of {path!r} nor {source.name} contain {HEAD}, the head of a "
            f"reward model for which the adapters were trained; train new adapters, or recreate them with "
            f"modules_to_save: [{HEAD!r}]"
        )
    return HeadPlan(
        note=f"{HEAD}, the head, comes from {source.name}; the adapters do not include it, so it is frozen"
    )


def is_whole(config: Any) -> bool:
    """Return whether the head is trained in full."""
    return HEAD in (getattr(config, "modules_to_save", None) or ())


def is_target(config: Any) -> bool:
    """Return whether the head gets an adapter. PEFT's ``all-linear`` includes it unless the task is classification."""
    targets = getattr(config, "target_modules", None) or ()
    if isinstance(targets, str):
        return targets == _ALL or re.fullmatch(targets, HEAD) is not None
    return HEAD in targets


def task_type(config: Any, source: ModelSource) -> str | None:
    """Return PEFT's task type.

    It is None for a frozen or adapted head, because ``SEQ_CLS`` trains the head in full.
    """
    if not classifies(source):
        return "CAUSAL_LM"
    return "SEQ_CLS" if is_whole(config) else None


def in_checkpoint(source: ModelSource, certain: bool = False) -> bool:
    """Return whether the initial head is the one in the checkpoint that the model comes from.

    Nothing is downloaded. For a Hub name whose weights are not cached, the configuration decides, unless the result
    has to be ``certain``. A live model's head must equal the one in its checkpoint, in a folder or in the Hub cache.
    """
    known, weight = _stored(source)
    if source.live is None:
        return weight is not None if known else not certain and is_classifier(source.config)
    head = linear_head(source.live)
    return weight is not None and head is not None and _equal(head, weight)


def _equal(head: nn.Linear, stored: Tensor) -> bool:
    own: Any = head.weight
    if is_partitioned(own) or own.is_meta or own.shape != stored.shape:
        return False
    return bool(torch.equal(own.detach().cpu(), stored.to(own.dtype)))


def _stored(source: ModelSource) -> tuple[bool, Tensor | None]:
    """Return whether the checkpoint's files are available locally, and the weight of its head, if any."""
    name = HEAD_TENSORS[0]
    try:
        index = _local(source, f"{_WEIGHTS}.index.json")
        shard = _WEIGHTS if index is None else json.loads(index.read_text(encoding="utf-8"))["weight_map"].get(name)
        if shard is None:
            return True, None
        file = _local(source, shard)
        if file is None:
            return False, None
        with safe_open(file, framework="pt") as opened:
            return True, opened.get_tensor(name) if name in opened.keys() else None
    except (OSError, ValueError, LookupError, SafetensorError):  # loading reports the problem
        return False, None


def _local(source: ModelSource, file: str) -> Path | None:
    """Return the path of a file of the checkpoint if it is available locally."""
    name = source.path or source.config.name_or_path
    kwargs = source.init_kwargs if source.path else {}
    inner = Path(kwargs.get("subfolder", "")) / file
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name) / inner if (Path(name) / inner).is_file() else None
    found = try_to_load_from_cache(
        name, inner.as_posix(), cache_dir=kwargs.get("cache_dir"), revision=kwargs.get("revision")
    )
    return Path(found) if isinstance(found, str) else None
