"""What is uploaded, decided here and nowhere else: files by name, and the options without secrets and folders."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from alignment.engines.checkpoints.manifest import MANIFEST, Manifest
from alignment.models.adapters.record import TRAINING_BASE
from alignment.reporting.durable import replace_text
from alignment.reporting.model_card import is_secret, public

OPTIONS, CARD = "options.json", "README.md"
# Weights in whatever form a run may have left them before: a reader would take those that are not replaced.
WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"),
    *("adapter_model.safetensors", "adapter_config.json"),
)
_MODEL = (*WEIGHTS, "config.json", "generation_config.json", TRAINING_BASE)
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
_CODE = ("configuration_*.py", "modeling_*.py", "tokenization_*.py")  # where a configuration names it


def model_files(folder: Path, tokenizer: Any) -> list[str]:
    """The files of model, adapter and tokenizer in a folder that may hold anything, by their paths in it.

    Args:
        folder: a checkpoint or an output folder.
        tokenizer: what else its class writes is allowed as well.
    """
    vocabularies = getattr(tokenizer, "vocab_files_names", {})
    allowed = [*_MODEL, *_TOKENIZER, *vocabularies.values()]
    if any(_names_code(folder / name) for name in ("config.json", "tokenizer_config.json")):
        allowed += _CODE
    found = {path for pattern in allowed for path in folder.glob(str(pattern))}
    found = {path for path in found if path.is_file() and not path.is_symlink()}  # which could lead anywhere
    return sorted(str(path.relative_to(folder)) for path in found)


def _names_code(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return "auto_map" in json.loads(path.read_text(encoding="utf-8"))
    return False


def checkpoint_files(folder: Path) -> list[str]:
    """The files that were written as this checkpoint, its state among them, by their paths in it.

    Raises:
        CheckpointError: it has no manifest that can be read.
    """
    return [*Manifest.read(folder).files, MANIFEST]


def published_options(options: Mapping[str, Any]) -> str:
    """The options as JSON, without secrets, and without the folders of the machine."""
    shown = {name: public(value) for name, value in options.items() if not is_secret(name)}
    return json.dumps(shown, indent=2, default=str) + "\n"


def stage(source: Path, names: Iterable[str], target: Path, texts: Mapping[str, str] | None = None) -> int:
    """Put files into a folder that stays as it is while the source goes on changing; return their bytes.

    They are hard links where the file system has them: a run replaces and removes files, and changes none in place.

    Raises:
        OSError: one cannot be read, or the folder not be written.
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
    """Leave no half-filled folder behind."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
