"""Rows that are already tokenized, with the column names of the TRL releases.

They are used unchanged; no tokens are added. A column of completions may also contain the prompt, as TRL's CPO trainer
stores it; labels then tell where the prompt ends. Without labels, a column that starts with the prompt is ambiguous.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignment.config.errors import DataError, listing, show
from alignment.data.formats import Kind
from alignment.data.targets.rules import Learned, RowRules, divided

IGNORED = -100  # the label of a token that is not in the loss
_MASKS = ("completion_mask", "assistant_masks")
# The columns of each kind, in all spellings, in the order in which rows use them.
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
    "preference": ("chosen_labels", "rejected_labels"),
    "unpaired_preference": ("completion_labels",),
}


@dataclass(frozen=True)
class TokenColumns:
    """The token ID columns of a dataset, in the order in which rows use them.

    Attributes:
        ids: their names.
        masks: the attention mask column of each; None if it has none.
        beside: further columns that are used.
    """

    ids: tuple[str, ...]
    masks: tuple[str | None, ...]
    beside: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All columns that are used."""
        return (*self.ids, *(name for name in self.masks if name), *self.beside)


def token_columns(kind: Kind, there: Collection[str]) -> TokenColumns | None:
    """Return the columns of tokenized rows of a kind, or None if the data does not have all columns of a spelling."""
    for spelling in _SPELLINGS.get(kind, ()):
        if all(name in there for name in spelling):
            ids = tuple(name for name in spelling if name != "label")
            masks = tuple(next((mask for mask in _mask_names(name) if mask in there), None) for name in ids)
            further = ("label",) if "label" in spelling else ()
            return TokenColumns(ids, masks, further + tuple(n for n in _BESIDE.get(kind, ()) if n in there))
    return None


def check_tokenized(columns: TokenColumns | None, where: str, there: Iterable[str]) -> None:
    """Check that rows need no preparation, as ``skip_prepare_dataset`` requires, and that no mask is ignored.

    Args:
        columns: the token ID columns that were found.
        where: name of the data in messages.
        there: all columns, for messages.

    Raises:
        DataError: there are no token IDs, or there are masks that would have to be converted to labels.
    """
    if columns is None:
        raise DataError(
            f"{where}: skip_prepare_dataset requires tokenized rows (input_ids, and labels unless all tokens are in "
            f"the loss); columns: {listing(there)}"
        )
    if "labels" not in columns.beside and (masks := [name for name in _MASKS if name in columns.beside]):
        raise DataError(
            f"{where}: skip_prepare_dataset ignores {listing(masks)}, so the loss would cover all tokens. Add a "
            f"'labels' column with {IGNORED} for the other tokens, or remove skip_prepare_dataset"
        )


def check_whole(columns: TokenColumns, where: str, there: Collection[str]) -> None:
    """Check that columns that are read as whole sequences are not completions beside a column of prompts.

    Raises:
        DataError: there is a column of prompts.
    """
    for name in ("prompt_ids", "prompt_input_ids"):
        if name in there:
            raise DataError(
                f"{where}: {listing(columns.ids)} are read as complete sequences, but column {name!r} suggests that "
                f"they are completions only; remove {name!r} if they contain the prompt, or pass the rows as text"
            )


def all_token_columns(kind: Kind) -> set[str]:
    """Return all columns that tokenized rows of a kind may use, in any spelling."""
    ids = {name for spelling in _SPELLINGS.get(kind, ()) for name in spelling}
    return ids | {mask for name in ids for mask in _mask_names(name)} | {*_BESIDE.get(kind, ())}


def _mask_names(column: str) -> tuple[str, ...]:
    """Return the possible names of the attention mask of a token ID column."""
    if "input_ids" in column:
        return (column.replace("input_ids", "attention_mask"),)
    return (column.removesuffix("_ids") + "_attention_mask", column.removesuffix("_ids") + "_mask")


def read_ids(row: Mapping[str, Any], columns: TokenColumns, where: str, vocabulary: int) -> list[list[int]]:
    """Return the token IDs of a row's columns, without those masked by an attention mask.

    Args:
        row: one row.
        columns: its token ID columns.
        where: name of the row in messages.
        vocabulary: number of tokens of the tokenizer.

    Raises:
        DataError: a value is not a list of valid token IDs, or a mask has another length.
    """
    return [_seen(row, name, mask, None, where, vocabulary)[0] for name, mask in zip(columns.ids, columns.masks)]


def read_completions(
    kind: Kind, row: Mapping[str, Any], columns: TokenColumns, where: str, vocabulary: int
) -> list[list[int]]:
    """Return the token IDs of a row's prompt and of its completions, whose columns may also contain the prompt.

    Raises:
        DataError: see :func:`read_ids`; labels do not exclude the prompt and nothing else; or there are no labels, and
            the completions start with the prompt.
    """
    (prompt,) = read_ids(row, TokenColumns(columns.ids[:1], columns.masks[:1], ()), where, vocabulary)
    names = {name: name.removesuffix("_ids").removesuffix("_input") + "_labels" for name in columns.ids[1:]}
    given = [name for name in names.values() if row.get(name) is not None]
    if given and len(given) < len(names):
        missing = next(name for name in names.values() if name not in given)
        raise DataError(f"{where}: {missing} is missing, but {given[0]} is not; add both, or remove both")
    completions, inside = [], []
    for (name, labels), mask in zip(names.items(), columns.masks[1:]):
        ids, learned = _seen(row, name, mask, labels, where, vocabulary)
        border = next((place for place, kept in enumerate(learned) if kept), len(ids))
        if not all(learned[border:]):
            raise DataError(
                f"{where}: {labels} excludes tokens after the first token of the completion ({IGNORED}); the loss "
                f"covers complete completions, so expected {IGNORED} for the prompt's tokens only"
            )
        if border and ids[:border] != prompt:
            raise DataError(
                f"{where}: {labels} excludes {show(ids[:border])} as the prompt, but {columns.ids[0]} is "
                f"{show(prompt)}; expected the same token IDs; pass the row as text, or remove it"
            )
        completions.append(ids[border:])
        inside.append(not border and bool(prompt) and ids[: len(prompt)] == prompt)
    if all(inside) and (given or "input" in columns.ids[0]):  # prompt_ids are always beside completions alone
        raise DataError(
            f"{where}: {columns.ids[0]} is a prefix of {listing(names)}, and no labels exclude it, so it is ambiguous "
            f"whether they contain the prompt; add {listing(names.values())} with {IGNORED} for the prompt's tokens, "
            f"or rename columns without prompts to {listing(_SPELLINGS[kind][0][: len(columns.ids)])}"
        )
    return [prompt, *completions]


def _seen(
    row: Mapping[str, Any], name: str, mask: str | None, labels: str | None, where: str, vocabulary: int
) -> tuple[list[int], list[bool]]:
    """Return a column's token IDs and their loss mask according to labels, without masked tokens."""
    ids = _ids(row, name, where, vocabulary)
    learned = _labeled(row, labels, ids, name, where) if labels else None
    seen = None if mask is None else _beside(row, mask, name, len(ids), where)
    kept = range(len(ids)) if seen is None else [place for place, value in enumerate(seen) if value]
    return [ids[place] for place in kept], [learned is None or learned[place] for place in kept]


def _ids(row: Mapping[str, Any], name: str, where: str, vocabulary: int) -> list[int]:
    ids: Any = row.get(name)
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise DataError(f"{where}: {name} is {show(ids)}; expected a list of token IDs")
    wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise DataError(
            f"{where}: {name} contains token ID {wrong}, but the tokenizer has {vocabulary} tokens; tokenize the rows "
            "with the model's own tokenizer"
        )
    return list(ids)


def _beside(row: Mapping[str, Any], name: str, ids: str, length: int, where: str) -> list[Any] | None:
    """Return the value of a column with one entry per token, or None if it is null."""
    values = row.get(name)
    if values is not None and (not isinstance(values, list) or len(values) != length):
        raise DataError(
            f"{where}: {name} is {show(values)}; expected one value for each of the {length} tokens of {ids}"
        )
    return values


def learned_row(
    row: Mapping[str, Any], columns: TokenColumns, rules: RowRules, where: str, vocabulary: int
) -> Learned:
    """Read a tokenized row of ``prompt_completion``. Its labels, or else its masks, select the tokens in the loss.

    Raises:
        DataError: see :func:`read_ids`; or labels differ from the row's tokens.
    """
    (name,), (mask,) = columns.ids, columns.masks
    ids = _ids(row, name, where, vocabulary)
    seen = None if mask is None else _beside(row, mask, name, len(ids), where)
    learned = _learned(row, ids, name, rules, where)
    if seen is not None:
        ids, learned = ([v for v, kept in zip(values, seen) if kept] for values in (ids, learned))  # type: ignore[assignment]
    return divided(ids, learned)


def _learned(row: Mapping[str, Any], ids: Sequence[int], name: str, rules: RowRules, where: str) -> list[bool]:
    learned = _labeled(row, "labels", ids, name, where)
    if learned is not None:
        return learned
    masks = [_beside(row, mask, name, len(ids), where) for mask in _MASKS]
    if rules.completion_only is False:
        masks[0] = None
    if rules.completion_only and masks[0] is None:
        raise DataError(
            f"{where}: completion_only_loss requires completion_mask or labels for tokenized rows; add one to {name}"
        )
    if rules.assistant_only and masks[1] is None:
        raise DataError(
            f"{where}: assistant_only_loss requires assistant_masks or labels for tokenized rows; add one to {name}"
        )
    return [all(bits) for bits in zip(*[mask or [True] * len(ids) for mask in masks])]


def _labeled(row: Mapping[str, Any], column: str, ids: Sequence[int], name: str, where: str) -> list[bool] | None:
    """Return the loss mask of a column of labels, or None if it is null or missing."""
    labels = _beside(row, column, name, len(ids), where)
    if labels is None:
        return None
    for place, (label, token) in enumerate(zip(labels, ids)):
        if label not in (IGNORED, token):
            raise DataError(
                f"{where}: {column}[{place}] is {show(label)}, but {name}[{place}] is {token}; expected the same "
                f"token ID, or {IGNORED} to exclude the token from the loss"
            )
    return [label != IGNORED for label in labels]
