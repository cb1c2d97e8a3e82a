"""Inspect a PEFT adapter on disk without loading it: its type, the base model that it was trained on, its tensors.

PEFT does not record how the base model was quantized, or the task of an adapter without a ``task_type``. The trainer
writes both to ``training_base.json`` in the adapter's folder; adapters saved by other programs do not have this file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import PeftConfig
from safetensors import SafetensorError, safe_open

from alignment.config.errors import ModelError, first_line
from alignment.models.adapters.record import PREFIX, TRAINING_BASE, unsupported
from alignment.models.tasks import CAUSAL_LM, REWARD_MODEL, Task

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TASKS: dict[str, Task] = {"causal_lm": CAUSAL_LM, "classifier": REWARD_MODEL}
_PEFT_TASKS: dict[Any, str] = {"CAUSAL_LM": "causal_lm", "SEQ_CLS": "classifier"}


@dataclass(frozen=True)
class AdapterFolder:
    """The contents of an adapter folder.

    Attributes:
        path: the folder.
        config: PEFT's configuration, as stored on disk.
        base: folder or Hub name of the base model.
        revision: revision of the base model; None for the latest.
        quantization: ``Quantization.content()`` of the base model during training; None if it was not quantized or
            this was not recorded.
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
    """Record in an adapter's folder what it was trained on; see :class:`AdapterFolder`.

    ``merged`` says whether other adapters were merged into the base model before training.
    """
    content = {
        "base_model": base_model,
        "revision": revision,
        "quantization": quantization,
        "task": task_name(task),
        "dtype": dtype,
        **({"merged": True} if merged else {}),
    }
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
    reason = unsupported(config)
    if reason is not None:
        raise ModelError(f"{path}: {reason}")
    shapes, recorded = _shapes(path / _WEIGHTS), _recorded(path)
    if recorded.get("merged") and base is None:
        raise ModelError(
            f"{path}: it was trained on {recorded.get('base_model')} with other adapters merged into it; save the "
            "merged model and pass its folder with --base"
        )
    named = base or recorded.get("base_model") or config.base_model_name_or_path
    if not named:
        raise ModelError(f"{path / _CONFIG} does not name a base model; pass its folder or Hub name with --base")
    likely = "SEQ_CLS" if "score.weight" in shapes else "CAUSAL_LM"
    task = recorded.get("task") or _PEFT_TASKS.get(config.task_type or likely)
    if task is None:
        raise ModelError(f"{path}: task_type {config.task_type} is not supported; expected CAUSAL_LM or SEQ_CLS")
    return AdapterFolder(
        path,
        config,
        named,
        revision or (None if base else recorded.get("revision") or config.revision),
        recorded.get("quantization"),
        recorded.get("dtype"),
        _TASKS[task],
        shapes,
    )


def task_name(task: Task) -> str:
    """``causal_lm`` or ``classifier``."""
    return next(name for name, one in _TASKS.items() if one.auto is task.auto)


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes by name from the header, which also checks the length of the file."""
    if not file.is_file():
        raise ModelError(f"{file} is missing; copy or download the adapter again, or convert its adapter_model.bin")
    try:
        with safe_open(file, framework="pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is truncated or corrupt ({first_line(error)}); copy or download it again") from error
    if not shapes or any(0 in shape for shape in shapes.values()):
        raise ModelError(
            f"{file} has empty tensors; it was probably saved from weights partitioned by ZeRO-3 without gathering "
            "them; save the adapter again"
        )
    return {name.removeprefix(PREFIX): shape for name, shape in shapes.items()}


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
