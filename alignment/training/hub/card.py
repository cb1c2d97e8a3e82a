"""The model card of an upload: that of an export, with the caller's additions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment.checkpoint.card import card_of
from alignment.reporting.model_card import OURS, hub_id
from alignment.training.hub.contents import CARD

_TAGS = ("generated_from_trainer",)  # as on every card of transformers' Trainer, for searches on the Hub


@dataclass(frozen=True)
class Subject:
    """What is known of a model before anything is on disk.

    Attributes:
        title: its name.
        base: the model that was trained; None if it has no name.
        is_classifier: whether it is a reward model.
        is_adapter: whether adapters are written instead of the full model.
        tags: tags of the model and of its trainer's class.
    """

    title: str
    base: str | None
    is_classifier: bool
    is_adapter: bool
    tags: Sequence[str] = ()


@dataclass(frozen=True)
class Details:
    """What a caller may add to a card, with the arguments of :meth:`create_model_card`."""

    model_name: str | None = None
    dataset_name: str | Sequence[str] | None = None
    tags: str | Sequence[str] | None = None
    language: str | Sequence[str] | None = None
    license: str | None = None
    finetuned_from: str | None = None
    tasks: str | Sequence[str] | None = None
    dataset_tags: str | Sequence[str] | None = None
    dataset: str | Sequence[str] | None = None
    dataset_args: str | Sequence[str] | None = None


def card_text(folder: Path, subject: Subject, options: Mapping[str, Any], details: Details) -> str:
    """Return the card of the model in ``folder``, a checkpoint or an output folder."""
    written = "only the adapter is here; PEFT loads it on top of its base model" if subject.is_adapter else (
        "all weights are here; no adapter is needed"
    )  # fmt: skip
    card = card_of(
        folder,
        title=details.model_name or subject.title,
        is_classifier=subject.is_classifier,
        base=details.finetuned_from or subject.base,
        export=[written],
        options=options,
    )
    named = [*_several(details.dataset_name), *_several(details.dataset_tags)]
    mentioned = [*named, *_several(details.dataset)]
    arguments = [("arguments of the dataset", text) for text in _several(details.dataset_args)]
    return dataclasses.replace(
        card,
        library="peft" if subject.is_adapter else "transformers",
        datasets=[*dict.fromkeys([*card.datasets, *(name for name in named if hub_id(name))])],
        data=[*dict.fromkeys([*card.data, *(("dataset", name) for name in mentioned), *arguments])],
        tags=[*_TAGS, *subject.tags, *_several(details.tags)],
        model_name=details.model_name or subject.title,
        language=details.language,
        license=details.license,
        task=next(iter(_several(details.tasks)), None),
    ).text()


def own_card(folder: Path) -> bool:
    """Whether the folder has a card written by someone else, which must be kept."""
    try:
        text = (folder / CARD).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return f"- {OURS}\n" not in text.partition("\n---")[0] + "\n"


def _several(value: str | Sequence[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)
