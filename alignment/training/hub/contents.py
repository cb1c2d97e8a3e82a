"""The single place that decides what is uploaded: files, options without secrets and local paths, and a model card."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from alignment.checkpoint.card import card_of
from alignment.config.fields import words
from alignment.models.adapters.record import TRAINING_BASE
from alignment.reporting.model_card import OURS, hub_id, is_secret, public

CARD = "README.md"
# Weights in any format that an earlier upload may have used: files not replaced would still be loaded.
WEIGHTS = words(
    "model.safetensors model.safetensors.index.json model-*-of-*.safetensors adapter_model.safetensors "
    "adapter_config.json"
)
_CONFIGS = ("config.json", "tokenizer_config.json")
_OTHERS = words(
    "generation_config.json tokenizer.json special_tokens_map.json added_tokens.json chat_template.jinja "
    "chat_template.json additional_chat_templates/*.jinja"
)


def model_files(folder: Path, tokenizer: Any) -> list[str]:
    """Return the relative paths of model, adapter and tokenizer files in a folder that may contain anything."""
    allowed = [*WEIGHTS, *_CONFIGS, *_OTHERS, TRAINING_BASE, *getattr(tokenizer, "vocab_files_names", {}).values()]
    configs = [folder / name for name in _CONFIGS if (folder / name).is_file()]
    if any('"auto_map"' in path.read_text(encoding="utf-8", errors="replace") for path in configs):
        allowed += ["configuration_*.py", "modeling_*.py", "tokenization_*.py"]
    found = {path for pattern in allowed for path in folder.glob(str(pattern))}
    found = {path for path in found if path.is_file() and not path.is_symlink()}  # which could point anywhere
    return sorted(str(path.relative_to(folder)) for path in found)


def published_options(options: Mapping[str, Any]) -> str:
    """Return the options as JSON, without secrets and local paths."""
    shown = {name: public(value) for name, value in options.items() if not is_secret(name)}
    return json.dumps(shown, indent=2, default=str) + "\n"


def stage(source: Path, names: Iterable[str], target: Path) -> int:
    """Stage files in a folder that stays the same while the source changes; return their total bytes.

    Uses hard links if the file system supports them: a run replaces or removes files, and never changes them in place.
    """
    size = 0
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, target / name)
        except OSError:
            shutil.copyfile(source / name, target / name)
        size += (target / name).stat().st_size
    return size


class Subject(NamedTuple):
    """What is known of a model before anything is on disk; ``base``: the model that was trained, if it has a name."""

    title: str
    base: str | None
    is_classifier: bool
    is_adapter: bool
    tags: Sequence[str] = ()


def card_text(folder: Path, subject: Subject, options: Mapping[str, Any], details: Mapping[str, Any]) -> str:
    """Return the card of the model in ``folder``, a checkpoint or an output folder.

    ``details`` are arguments of the trainer's ``create_model_card``.
    """
    name, named = details.get("model_name", subject.title), _several(details.get("dataset_name", ()))
    export = "all weights are here; no adapter is needed"
    if subject.is_adapter:
        export = "only the adapter is here; PEFT loads it on top of its base model"
    card = card_of(folder, name, subject.is_classifier, subject.base, [export], options)
    return dataclasses.replace(
        card,
        library="peft" if subject.is_adapter else "transformers",
        datasets=[*dict.fromkeys([*card.datasets, *filter(hub_id, named)])],
        data=[*dict.fromkeys([*card.data, *(("dataset", each) for each in named)])],
        # The first tag is on every card of transformers' Trainer, for searches on the Hub.
        tags=["generated_from_trainer", *subject.tags, *_several(details.get("tags", ()))],
        model_name=name,
        language=details.get("language"),
        license=details.get("license"),
    ).text()


def own_card(folder: Path) -> bool:
    """Whether the folder has a card written by someone else, which must be kept."""
    try:
        text = (folder / CARD).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return f"- {OURS}\n" not in text.partition("\n---")[0] + "\n"


def _several(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
