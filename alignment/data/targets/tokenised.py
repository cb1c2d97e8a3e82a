"""Rows that hold token ids already, by the names that TRL's releases gave to their columns.

They are taken as they are: no token is put before, between or after them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignment.config.errors import DataError, listing, show
from alignment.data.formats import Kind
from alignment.data.targets.rules import Learned, RowRules, divided

IGNORED = -100  # the label of a token that is not learned
_MASKS = ("completion_mask", "assistant_masks")
# The columns of each kind, one spelling after another; in the order of the values that rows are made of.
_SPELLINGS: dict[Kind, tuple[tuple[str, ...], ...]] = {
    "prompt_completion": (("input_ids",),),
    "preference_margin": (
        ("chosen_ids", "rejected_ids"),
        ("chosen_input_ids", "rejected_input_ids"),
        ("input_ids_chosen", "input_ids_rejected"),
    ),
    "preference": (
        ("prompt_ids", "chosen_ids", "rejected_ids"),
        ("prompt_input_ids", "chosen_input_ids", "rejected_input_ids"),
    ),
    "unpaired_preference": (
        ("prompt_ids", "completion_ids", "label"),
        ("prompt_input_ids", "completion_input_ids", "label"),
    ),
}
_BESIDE: dict[Kind, tuple[str, ...]] = {
    "prompt_completion": ("labels", *_MASKS),
    "preference_margin": ("margin",),
    "unpaired_preference": ("completion_labels",),
}


@dataclass(frozen=True)
class TokenColumns:
    """Which columns hold token ids, in the order of the values of a row.

    Attributes:
        ids: their names.
        masks: the attention mask of each, None where there is none.
        beside: further columns that rows are made of.
    """

    ids: tuple[str, ...]
    masks: tuple[str | None, ...]
    beside: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All columns that rows are made of."""
        return (*self.ids, *(name for name in self.masks if name), *self.beside)


def token_columns(kind: Kind, there: Collection[str]) -> TokenColumns | None:
    """The columns of tokenised rows of a kind, or None where the data has not all of one spelling."""
    for spelling in _SPELLINGS.get(kind, ()):
        if all(name in there for name in spelling):
            ids = tuple(name for name in spelling if name != "label")
            masks = tuple(next((mask for mask in _mask_names(name) if mask in there), None) for name in ids)
            further = ("label",) if "label" in spelling else ()
            return TokenColumns(ids, masks, further + tuple(n for n in _BESIDE.get(kind, ()) if n in there))
    return None


def check_tokenised(columns: TokenColumns | None, where: str, there: Iterable[str]) -> None:
    """Check that rows need no preparation, as ``skip_prepare_dataset`` says, and that nothing of them is left aside.

    Args:
        columns: those of token ids that were found.
        where: names the data in messages.
        there: all columns, for messages.

    Raises:
        DataError: there are no token ids; or masks that would have to be made into labels.
    """
    if columns is None:
        raise DataError(
            f"{where}: skip_prepare_dataset needs rows of token ids (input_ids, and labels if not all are learned); "
            f"columns: {listing(there)}"
        )
    if "labels" not in columns.beside and (masks := [name for name in _MASKS if name in columns.beside]):
        raise DataError(
            f"{where}: skip_prepare_dataset leaves {listing(masks)} unread, so that every token would be learned. Add "
            f"a 'labels' column with {IGNORED} for tokens that are not, or leave skip_prepare_dataset out"
        )


def all_token_columns(kind: Kind) -> set[str]:
    """Every column that tokenised rows of a kind may be made of, in any spelling."""
    ids = {name for spelling in _SPELLINGS.get(kind, ()) for name in spelling}
    return ids | {mask for name in ids for mask in _mask_names(name)} | {*_BESIDE.get(kind, ())}


def _mask_names(column: str) -> tuple[str, ...]:
    """What the attention mask of a column of ids may be called."""
    if "input_ids" in column:
        return (column.replace("input_ids", "attention_mask"),)
    return (column.removesuffix("_ids") + "_attention_mask", column.removesuffix("_ids") + "_mask")


def read_ids(row: Mapping[str, Any], columns: TokenColumns, where: str, vocabulary: int) -> list[list[int]]:
    """The token ids of a row's columns, without those that an attention mask hides.

    Args:
        row: one row.
        columns: which of its values are ids.
        where: names the row in messages.
        vocabulary: ids are below it.

    Raises:
        DataError: a value that is no list of ids of the tokenizer, or a mask of another length.
    """
    return [_ids(row, name, mask, where, vocabulary) for name, mask in zip(columns.ids, columns.masks)]


def _ids(row: Mapping[str, Any], name: str, mask: str | None, where: str, vocabulary: int) -> list[int]:
    ids = row.get(name)
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise DataError(f"{where}: {name} is {show(ids)}; give a list of token ids")
    wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise DataError(
            f"{where}: {name} has the id {wrong}, and the tokenizer has {vocabulary} tokens; tokenise the rows with "
            "the model's own tokenizer"
        )
    kept = None if mask is None else _beside(row, mask, name, len(ids), where)
    return ids if kept is None else [token for token, seen in zip(ids, kept) if seen]


def _beside(row: Mapping[str, Any], name: str, ids: str, length: int, where: str) -> list[Any] | None:
    """The value of a column with one entry per token; None where it is null."""
    values = row.get(name)
    if values is not None and (not isinstance(values, list) or len(values) != length):
        raise DataError(f"{where}: {name} is {show(values)}; give one value for each of the {length} tokens of {ids}")
    return values


def learned_row(
    row: Mapping[str, Any], columns: TokenColumns, rules: RowRules, where: str, vocabulary: int
) -> Learned:
    """A tokenised row of ``prompt_completion``: which tokens are learned is said by its labels, or else its masks.

    Raises:
        DataError: as :func:`read_ids`, or labels that are other tokens than those of the row.
    """
    (name,), (mask,) = columns.ids, columns.masks
    (ids,) = read_ids(row, TokenColumns(columns.ids, (None,), ()), where, vocabulary)
    seen = None if mask is None else _beside(row, mask, name, len(ids), where)
    learned = _learned(row, ids, name, rules, where)
    if seen is not None:
        ids, learned = ([v for v, kept in zip(values, seen) if kept] for values in (ids, learned))  # type: ignore[assignment]
    return divided(ids, learned)


def _learned(row: Mapping[str, Any], ids: Sequence[int], name: str, rules: RowRules, where: str) -> list[bool]:
    labels = _beside(row, "labels", name, len(ids), where)
    if labels is not None:
        for place, (label, token) in enumerate(zip(labels, ids)):
            if label not in (IGNORED, token):
                raise DataError(
                    f"{where}: labels[{place}] is {show(label)}, and {name}[{place}] is {token}; labels are the ids "
                    f"themselves, or {IGNORED} for a token that is not learned"
                )
        return [label != IGNORED for label in labels]
    masks = [_beside(row, mask, name, len(ids), where) for mask in _MASKS]
    if rules.completion_only is False:
        masks[0] = None
    if rules.completion_only and masks[0] is None:
        raise DataError(
            f"{where}: completion_only_loss needs to know the completion; add completion_mask or labels beside {name}"
        )
    if rules.assistant_only and masks[1] is None:
        raise DataError(
            f"{where}: assistant_only_loss needs to know the assistant's tokens; add assistant_masks or labels "
            f"beside {name}"
        )
    return [all(bits) for bits in zip(*[mask or [True] * len(ids) for mask in masks])]


def completion_of(row: Mapping[str, Any], completion: list[int], where: str) -> list[int]:
    """A completion's own ids, where the column holds prompt and completion: ``completion_labels`` says which are."""
    labels = _beside(row, "completion_labels", "completion_input_ids", len(completion), where)
    return completion if labels is None else [t for t, label in zip(completion, labels) if label != IGNORED]
