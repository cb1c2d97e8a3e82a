"""Rows that are already tokenized, with the column names of the TRL releases.

They are used unchanged; no tokens are added. A column of completions may also contain the prompt, as TRL's CPO trainer
stores it; labels then tell where the prompt ends. Without labels, a column that starts with the prompt is ambiguous.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignment.config.errors import DataError, listing, show
from alignment.data.targets.rules import divided
from alignment.data.tokenization import Encoded, common_length

IGNORED = -100  # the label of a token that is not in the loss
_MASKS = ("completion_mask", "assistant_masks")
_PACKED = "seq_lengths"  # the lengths of the sequences of a pack


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


@dataclass(frozen=True)
class TokenFormat:
    """The columns of tokenized rows of one kind.

    Attributes:
        spellings: the token ID columns in the order in which rows use them, in each accepted spelling.
        beside: further columns that are used.
        required: columns among ``beside`` without which rows do not count as tokenized.
        whole: whether completions are complete sequences, with the prompt.
        demanded: whether rows must already be tokenized (``skip_prepare_dataset``).
    """

    spellings: tuple[tuple[str, ...], ...] = ()
    beside: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    whole: bool = False
    demanded: bool = False

    @property
    def names(self) -> set[str]:
        """All columns that may be used, in any spelling."""
        ids = {name for spelling in self.spellings for name in spelling}
        return ids | {mask for name in ids for mask in _mask_names(name)} | {*self.beside}

    def find(self, there: Collection[str]) -> TokenColumns | None:
        """Return the columns to use, or None if the data does not have all columns of a spelling."""
        for ids in self.spellings:
            if all(name in there for name in (*ids, *self.required)):
                masks = tuple(next((mask for mask in _mask_names(name) if mask in there), None) for name in ids)
                return TokenColumns(ids, masks, tuple(name for name in self.beside if name in there))
        return None

    def check(self, there: Collection[str], where: str) -> None:
        """Check for what no single row shows.

        Raises:
            DataError: rows need preparation that is skipped, masks would be ignored, complete sequences are beside
                prompts, or rows are packs.
        """
        columns = self.find(there)
        if self.demanded:
            _check_demanded(columns, where, there)
        for name in ("prompt_ids", "prompt_input_ids"):
            if columns is not None and self.whole and name in there:
                raise DataError(
                    f"{where}: {listing(columns.ids)} are read as complete sequences, but column {name!r} suggests "
                    f"that they are completions only; remove {name!r} if they contain the prompt, or pass the rows as "
                    "text"
                )
        if columns is not None and not columns.ids[1:] and _PACKED in there:
            raise DataError(
                f"{where}: the rows are already packed ({_PACKED!r}), so their sequences would attend to one another; "
                "pass the original rows and set packing: true"
            )


def _check_demanded(columns: TokenColumns | None, where: str, there: Iterable[str]) -> None:
    """Check that rows need no preparation, and that no mask is ignored."""
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


def _mask_names(column: str) -> tuple[str, ...]:
    """Return the possible names of the attention mask of a token ID column."""
    if "input_ids" in column:
        return (column.replace("input_ids", "attention_mask"),)
    return (column.removesuffix("_ids") + "_attention_mask", column.removesuffix("_ids") + "_mask")


def read_whole(row: Mapping[str, Any], columns: TokenColumns, where: str, vocabulary: int) -> Encoded:
    """Read complete sequences. What they have in common is the prompt; each completion keeps at least one token.

    Raises:
        DataError: a value is not a list of valid token IDs, or a mask has another length.
    """
    sequences = read_ids(row, columns, where, vocabulary)
    room = min(map(len, sequences)) - 1
    shared = common_length(sequences[0][: max(room, 0)], sequences)
    return Encoded(sequences[0][:shared], [ids[shared:] for ids in sequences])


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


def read_completions(row: Mapping[str, Any], columns: TokenColumns, where: str, vocabulary: int) -> Encoded:
    """Read a prompt and its completions, whose columns may also contain the prompt.

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
            f"or rename columns without prompts to {listing(name.replace('_input', '') for name in columns.ids)}"
        )
    return Encoded(prompt, completions)


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
    row: Mapping[str, Any],
    columns: TokenColumns,
    where: str,
    vocabulary: int,
    completion_only: bool | None,
    assistant_only: bool,
) -> Encoded:
    """Read a tokenized sequence. Its labels, or else its masks, select the tokens in the loss.

    Raises:
        DataError: see :func:`read_ids`; or labels differ from the row's tokens.
    """
    (name,), (mask,) = columns.ids, columns.masks
    ids = _ids(row, name, where, vocabulary)
    seen = None if mask is None else _beside(row, mask, name, len(ids), where)
    learned = _learned(row, ids, name, where, completion_only, assistant_only)
    if seen is not None:
        ids, learned = ([v for v, kept in zip(values, seen) if kept] for values in (ids, learned))  # type: ignore[assignment]
    return divided(ids, learned)


def _learned(
    row: Mapping[str, Any],
    ids: Sequence[int],
    name: str,
    where: str,
    completion_only: bool | None,
    assistant_only: bool,
) -> list[bool]:
    learned = _labeled(row, "labels", ids, name, where)
    if learned is not None:
        return learned
    masks = [_beside(row, mask, name, len(ids), where) for mask in _MASKS]
    if completion_only is False:
        masks[0] = None
    if completion_only and masks[0] is None:
        raise DataError(
            f"{where}: completion_only_loss requires completion_mask or labels for tokenized rows; add one to {name}"
        )
    if assistant_only and masks[1] is None:
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
