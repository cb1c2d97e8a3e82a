"""The single place that decides what is uploaded: file names, and options without secrets and local paths."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from alignment.checkpoint.manifest import MANIFEST, Manifest
from alignment.models.adapters.record import TRAINING_BASE
from alignment.reporting.durable import replace_text
from alignment.reporting.model_card import is_secret, public

OPTIONS, CARD = "options.json", "README.md"
# Weights in any format that an earlier upload may have used: files not replaced would still be loaded.
WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"),
    *("adapter_model.safetensors", "adapter_config.json"),
)
_MODEL = (*WEIGHTS, "config.json", "generation_config.json", TRAINING_BASE)
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
_CODE = ("configuration_*.py", "modeling_*.py", "tokenization_*.py")  # if a configuration refers to it


def model_files(folder: Path, tokenizer: Any) -> list[str]:
    """Return the relative paths of model, adapter and tokenizer files in a folder that may contain anything.

    Args:
        folder: a checkpoint or an output folder.
        tokenizer: its class's vocabulary files are included.
    """
    vocabularies = getattr(tokenizer, "vocab_files_names", {})
    allowed = [*_MODEL, *_TOKENIZER, *vocabularies.values()]
    if any(_names_code(folder / name) for name in ("config.json", "tokenizer_config.json")):
        allowed += _CODE
    found = {path for pattern in allowed for path in folder.glob(str(pattern))}
    found = {path for path in found if path.is_file() and not path.is_symlink()}  # which could point anywhere
    return sorted(str(path.relative_to(folder)) for path in found)


def _names_code(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return "auto_map" in json.loads(path.read_text(encoding="utf-8"))
    return False


def checkpoint_files(folder: Path) -> list[str]:
    """Return the relative paths of the files of a checkpoint, its state included.

    Raises:
        CheckpointError: if it has no readable manifest.
    """
    return [*Manifest.read(folder).files, MANIFEST]


def published_options(options: Mapping[str, Any]) -> str:
    """Return the options as JSON, without secrets and local paths."""
    shown = {name: public(value) for name, value in options.items() if not is_secret(name)}
    return json.dumps(shown, indent=2, default=str) + "\n"


def stage(source: Path, names: Iterable[str], target: Path, texts: Mapping[str, str] | None = None) -> int:
    """Stage files in a folder that stays the same while the source changes; return their total bytes.

    Uses hard links if the file system supports them: a run replaces or removes files, and never changes them in place.

    Raises:
        OSError: if a file cannot be read, or the folder cannot be written.
    """
    size = 0
    target.mkdir(parents=True)
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, target / name)
        except OSError:
            shutil.copyfile(source / name, target / name)
        size += (target / name).stat().st_size
    for name, text in (texts or {}).items():
        replace_text(target / name, text)
        size += len(text)
    return size


@contextlib.contextmanager
def removed_if_failed(folder: Path) -> Iterator[None]:
    """Remove a partly filled folder on failure."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
