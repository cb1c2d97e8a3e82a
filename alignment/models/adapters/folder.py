"""Inspect a PEFT adapter on disk without loading it: its type, the base model that it was trained on, its tensors.

PEFT does not record how the base model was quantized, or the task of an adapter without a ``task_type``. The trainer
writes both to ``training_base.json`` in the adapter's folder; adapters saved by other programs do not have this file.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftType, TaskType
from safetensors import SafetensorError, safe_open

from alignment.config.errors import ModelError, first_line
from alignment.models.adapters.kinds import KINDS
from alignment.models.adapters.record import TRAINING_BASE
from alignment.models.tasks import CAUSAL_LM, REWARD_MODEL, Task

MERGEABLE = tuple(map(PeftType, KINDS))
_CONFIG, _WEIGHTS, _PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
_WRAPPED = re.compile(r"\.(original_module|modules_to_save)\.")
_TASKS: dict[str, Task] = {"causal_lm": CAUSAL_LM, "classifier": REWARD_MODEL}
_PEFT_TASKS: dict[Any, Task] = {TaskType.CAUSAL_LM: CAUSAL_LM, TaskType.SEQ_CLS: REWARD_MODEL}
# LoRA options that change more than weights -> why such an adapter cannot be merged.
_UNMERGEABLE = {
    "layer_replication": "it duplicates layers of the base model",
    "alora_invocation_tokens": "it is only active after its invocation tokens",
    "arrow_config": "it selects among several adapters for each token",
}


@dataclass(frozen=True)
class AdapterFolder:
    """The contents of an adapter folder.

    Attributes:
        path: the folder.
        config: PEFT's configuration, as stored on disk.
        base: folder or Hub name of the base model.
        revision: revision of the base model; None for the latest.
        quantization: ``BitsAndBytesConfig.to_dict()`` of the base model during training; None if it was not quantized
            or this was not recorded.
        dtype: torch's name of the dtype during training; None if it was not recorded.
        task: what the base model is loaded as.
        shapes: shapes of the tensors, by name in the file without PEFT's prefix.
    """

    path: Path
    config: PeftConfig
    base: str
    revision: str | None
    quantization: dict[str, Any] | None
    dtype: str | None
    task: Task
    shapes: dict[str, tuple[int, ...]]

    @property
    def weights(self) -> Path:
        """The path of the weights file."""
        return self.path / _WEIGHTS

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder also contains a tokenizer."""
        return (self.path / "tokenizer_config.json").is_file()


def write_training_base(
    folder: Path,
    *,
    base_model: str,
    revision: str | None,
    quantization: dict[str, Any] | None,
    task: Task,
    merged: bool = False,
    dtype: str | None = None,
) -> None:
    """Record in an adapter's folder what it was trained on, for :func:`read_adapter`.

    Args:
        folder: the adapter's folder.
        base_model: folder or Hub name of the base model.
        revision: revision of the base model.
        quantization: ``BitsAndBytesConfig.to_dict()``, or None if the base model is not quantized.
        task: what the base model was loaded as.
        merged: whether other adapters were merged into the base model before training.
        dtype: torch's name of the compute dtype, such as ``bfloat16``.
    """
    content: dict[str, Any] = {
        "base_model": base_model,
        "revision": revision,
        "quantization": quantization,
        "task": task_name(task),
        "dtype": dtype,
    }
    if merged:
        content["merged"] = True
    (folder / TRAINING_BASE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_adapter(path: Path, base: str | None = None, revision: str | None = None) -> AdapterFolder:
    """Read an adapter folder without loading its weights. ``base`` and ``revision`` override its base model.

    Raises:
        ModelError: it is not an adapter folder, its weights are missing or truncated, or it cannot be merged.
    """
    try:
        config = PeftConfig.from_pretrained(str(path))
    except Exception as error:  # invalid JSON, or keys of a newer PEFT
        raise ModelError(f"{path / _CONFIG} cannot be read: {first_line(error)}") from error
    _check_type(path, config)
    shapes = _shapes(path / _WEIGHTS)
    recorded = _recorded(path)
    if recorded.get("merged") and base is None:
        raise ModelError(
            f"{path}: it was trained on {recorded.get('base_model')} with other adapters merged into it; save the "
            "merged model and pass its folder with --base"
        )
    named = base or recorded.get("base_model") or config.base_model_name_or_path
    if not named:
        raise ModelError(f"{path / _CONFIG} does not name a base model; pass its folder or Hub name with --base")
    own_revision = None if base else recorded.get("revision") or config.revision
    task = _TASKS.get(recorded.get("task", "")) or _task(path, config, shapes)
    return AdapterFolder(
        path,
        config,
        named,
        revision or own_revision,
        recorded.get("quantization"),
        recorded.get("dtype"),
        task,
        shapes,
    )


def task_name(task: Task) -> str:
    """``causal_lm`` or ``classifier``."""
    return next(name for name, one in _TASKS.items() if one.auto is task.auto)


def _check_type(path: Path, config: PeftConfig) -> None:
    """Reject adapters that cannot be expressed as weights of the base model."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    names = ", ".join(one.value for one in MERGEABLE)
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise ModelError(
            f"{path}: {kind} is a prompt learning method, which adds inputs and changes no weights, so it cannot be "
            f"merged; mergeable types: {names}"
        )
    if config.peft_type not in MERGEABLE:
        raise ModelError(f"{path}: adapters of type {kind} cannot be exported; exportable types: {names}")
    for name, reason in _UNMERGEABLE.items():
        if getattr(config, name, None) is not None:
            raise ModelError(f"{path}: an adapter with {name} cannot be merged, because {reason}; load it with PEFT")


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes by name from the header, which also checks the length of the file."""
    if not file.is_file():
        if file.with_name("adapter_model.bin").is_file():
            raise ModelError(f"{file.parent}: its weights are a pickle (adapter_model.bin); save them as {file.name}")
        raise ModelError(f"{file} is missing; copy or download the adapter again")
    try:
        with safe_open(file, framework="pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is truncated or corrupt ({first_line(error)}); copy or download it again") from error
    empty = next((name for name, shape in shapes.items() if 0 in shape), None)
    if empty or not shapes:
        what = f"{empty} is empty" if empty else "it contains no tensors"
        raise ModelError(
            f"{file}: {what}; it was probably saved from weights partitioned by ZeRO-3 without gathering them; save "
            "the adapter again"
        )
    # If the vocabulary was resized, PEFT writes a saved embedding twice: once as the base's and once as its wrapper's.
    return {name.removeprefix(_PREFIX): shape for name, shape in shapes.items() if not _WRAPPED.search(name)}


def _recorded(path: Path) -> dict[str, Any]:
    file = path / TRAINING_BASE
    if not file.is_file():
        return {}
    try:
        recorded = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(recorded, dict) or recorded.get("task", "causal_lm") not in _TASKS:
            raise ValueError(f"expected an object with task one of {', '.join(_TASKS)}")
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {first_line(error)}; fix or remove it") from error
    return recorded


def _task(path: Path, config: PeftConfig, shapes: dict[str, tuple[int, ...]]) -> Task:
    """Return the task recorded by PEFT, or determine it by whether the adapter contains a classifier's head."""
    if config.task_type is None:
        return REWARD_MODEL if "score.weight" in shapes else CAUSAL_LM
    if config.task_type not in _PEFT_TASKS:
        raise ModelError(f"{path}: task_type {config.task_type} is not supported; expected CAUSAL_LM or SEQ_CLS")
    return _PEFT_TASKS[config.task_type]
