"""The head of a reward model beside adapters: whether they train it, and whether a checkpoint holds it.

The choice is PEFT's wherever a user has made one in Python: a head that the configuration names is trained whole
(``modules_to_save``, or ``task_type="SEQ_CLS"``) or gets an adapter (``target_modules``), and one that it does not
name stays as it is. Two things differ, because nobody asks for them: a head that a run draws at random is trained
although a new configuration does not name it, and a head that is in no checkpoint is saved with adapters that do not
hold it, for without it they mean nothing. A live ``PeftModel`` over a new head is taken as it was built, with a line
that says so: the layers below learn to answer along a fixed direction, which works, so it is no certain mistake.
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
_FIX = f"to train it, name it in the configuration: modules_to_save=[{HEAD!r}], or task_type='SEQ_CLS'"


class HeadPlan(NamedTuple):
    """What becomes of the head.

    Attributes:
        whole: it has to be added to ``modules_to_save``.
        kept: it is saved as it is, beside adapters that do not hold it.
        note: a sentence for the user; empty where the configuration says it.
    """

    whole: bool = False
    kept: bool = False
    note: str = ""


def plan_new(config: Any, source: ModelSource) -> HeadPlan:
    """The head beside adapters that begin with the run, by a configuration that was given in Python."""
    named = str(getattr(config.task_type, "value", config.task_type)) == "SEQ_CLS"
    if named or is_whole(config):
        return HeadPlan(whole=True)
    held = in_checkpoint(source)
    if is_target(config) and (held or config.target_modules != _ALL):
        note = f"{HEAD}, the head, is in no checkpoint and gets an adapter: it is saved with the adapters"
        return HeadPlan(kept=not in_checkpoint(source, certain=True), note="" if held else note)
    if held:
        note = f"{HEAD}, the head, is that of {source.name}, and stays as it is: {_FIX}"
        return HeadPlan(kept=not in_checkpoint(source, certain=True), note=note)
    return HeadPlan(whole=True, note=f"{HEAD}, the head, is in no checkpoint, so it is trained with the adapters")


def plan_live(config: Any, source: ModelSource) -> HeadPlan:
    """The head of a live model that has adapters already."""
    if is_whole(config):
        return HeadPlan()
    if in_checkpoint(source):
        note = f"{HEAD}, the head, is that of {source.name}, and the adapters leave it out: it stays as it is; {_FIX}"
        return HeadPlan(note="" if is_target(config) else note)
    if is_target(config):
        return HeadPlan(kept=True, note=f"{HEAD}, the head, is in no checkpoint: it is saved with the adapters")
    return HeadPlan(
        kept=True,
        note=(
            f"{HEAD}, the head, is in no checkpoint, and the adapters leave it out: it stays at its random "
            f"values, and is saved with the adapters; {_FIX}"
        ),
    )


def plan_saved(config: Any, source: ModelSource, path: str, tensors: dict[str, Tensor]) -> HeadPlan:
    """The head beside adapters of a folder.

    Raises:
        ModelError: they were made for a head that is nowhere.
    """
    if is_whole(config):
        return HeadPlan()
    if any(f"base_model.model.{name}" in tensors for name in HEAD_TENSORS):
        return HeadPlan(kept=True)
    if not in_checkpoint(source):
        raise ModelError(
            f"adapter_name_or_path: the adapters of {path!r} leave out {HEAD}, the head of a reward model, and "
            f"{source.name} has none, so it would be another one than they were made for; begin with new ones, or "
            f"make them with modules_to_save: [{HEAD!r}]"
        )
    return HeadPlan(
        note=f"{HEAD}, the head, is that of {source.name}, and the adapters leave it out: it stays as it is"
    )


def is_whole(config: Any) -> bool:
    """Whether the head is trained whole."""
    return HEAD in (getattr(config, "modules_to_save", None) or ())


def is_target(config: Any) -> bool:
    """Whether the head gets an adapter. PEFT counts it among all linear layers, unless the task is to classify."""
    targets = getattr(config, "target_modules", None) or ()
    if isinstance(targets, str):
        return targets == _ALL or re.fullmatch(targets, HEAD) is not None
    return HEAD in targets


def task_type(config: Any, source: ModelSource) -> str | None:
    """PEFT's name of the task. Of a classifier whose head is not trained whole it has none: with one it would be."""
    if not classifies(source):
        return "CAUSAL_LM"
    return "SEQ_CLS" if is_whole(config) else None


def in_checkpoint(source: ModelSource, certain: bool = False) -> bool:
    """Whether the head that training begins with is the one of the checkpoint that the model comes from.

    Nothing is downloaded for the answer. Of a hub name whose weights are not here yet its configuration tells, which
    is not ``certain``; a live model's head has to equal the one of its checkpoint, in a folder or in the hub's cache.
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
    """Whether the names in a checkpoint can be known here, and the weight of its head, if it has one."""
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
    except (OSError, ValueError, LookupError, SafetensorError):  # loading says what is wrong with it
        return False, None


def _local(source: ModelSource, file: str) -> Path | None:
    """A file of the checkpoint, if it is on this machine."""
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
