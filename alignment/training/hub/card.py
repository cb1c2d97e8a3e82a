"""The model card of what a trainer uploads: that of an export, with what the caller adds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment.config.errors import CheckpointError
from alignment.engines.checkpoints.manifest import Manifest
from alignment.engines.exporting.card import Run, card_of
from alignment.reporting.model_card import OURS, hub_id
from alignment.training.hub.contents import CARD

_TAGS = ("generated_from_trainer",)  # as every card of transformers' trainer has, which searches on the hub go by


@dataclass(frozen=True)
class Subject:
    """What is known of a model before anything is on disk.

    Attributes:
        title: its name.
        base: what was trained; None where it has no name.
        is_classifier: whether it is a reward model.
        is_adapter: whether adapters are written, and not the whole model.
        tags: of the model itself, and of its trainer's class.
    """

    title: str
    base: str | None
    is_classifier: bool
    is_adapter: bool
    tags: Sequence[str] = ()


@dataclass(frozen=True)
class Details:
    """What a caller may add to a card, as :meth:`create_model_card` takes it."""

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
    """The card of the model in ``folder``, a checkpoint or an output folder."""
    try:
        manifest: Manifest | None = Manifest.read(folder)
    except CheckpointError:
        manifest = None
    written = "only the adapter is here; PEFT loads it on top of its base model" if subject.is_adapter else (
        "all weights are here; no adapter is needed"
    )  # fmt: skip
    card = card_of(
        Run(folder, manifest, options),
        title=details.model_name or subject.title,
        is_classifier=subject.is_classifier,
        base=details.finetuned_from or subject.base,
        export=[written],
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
    """Whether the folder has a card that somebody else wrote, which is then left as it is."""
    try:
        text = (folder / CARD).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return f"- {OURS}\n" not in text.partition("\n---")[0] + "\n"


def _several(value: str | Sequence[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)
