"""What a kind of rows defines: its columns and formats, its text, its tokens, what is stored, and its batches."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset, Features, List, Value

from alignment.config.errors import DataError, listing
from alignment.config.options_data import COLUMNS
from alignment.data.batching import AnyBatch
from alignment.data.messages import Row, Source
from alignment.data.targets import TokenColumns, TokenFormat, read_completions, read_whole
from alignment.data.tokenization import CUT_ALIKE, IDENTICAL, Encoded, Limits, RowTokenizer, fit
from alignment.data.windows import WindowPlan

Record = dict[str, Any]
IDS = List(Value("int32"))
TEMPLATE = ("tools", "chat_template_kwargs")  # columns with variables for the chat template
TRUNCATED = {"prompt_cut": Value("bool"), "completions_cut": Value("int8")}  # what was truncated in a row


@dataclass(frozen=True)
class Kind(ABC):
    """A kind of rows; an object without state, except for options that decide how rows are read.

    Attributes:
        name: its name, part of the names of cached data.
        formats: the columns of each accepted format, the usual one first.
        optional: further columns that its rows may have.
        tokens: the columns of rows that are already tokenized.
        completions: columns of tokenized rows that contain completions.
        further: features of tokenized rows other than token IDs and ``row``.
        divides: whether every completion of a row becomes a tokenized row, with its own entry of each list in
            ``Encoded.further``, and with ``prompt_key``, a number that is equal for equal prompts.
        whole: whether sequences are scored at their last token, and need no context (reward models).
        keeps_columns: whether columns that it does not know are kept.
    """

    name: ClassVar[str]
    optional: ClassVar[tuple[str, ...]] = ("prompt", *TEMPLATE)
    tokens: ClassVar[TokenFormat] = TokenFormat()
    completions: ClassVar[tuple[str, ...]] = ()
    further: ClassVar[Mapping[str, Any]] = {}
    divides: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    keeps_columns: ClassVar[bool] = False

    @property
    @abstractmethod
    def formats(self) -> tuple[tuple[str, ...], ...]: ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that its rows may have, by their expected names.

        Unless a kind keeps others, these include the columns of other kinds: unread, but part of the key of the data.
        """
        unread = () if self.keeps_columns else (name for name in COLUMNS if name != "margin")
        return tuple(dict.fromkeys([*(name for form in self.formats for name in form), *self.optional, *unread]))

    @property
    def features(self) -> Features:
        """The features of tokenized rows."""
        ids = dict.fromkeys(("prompt_ids", *self.completions), IDS)
        return Features({**ids, **self.further, "row": Value("int64"), **TRUNCATED})

    def check_columns(self, names: Collection[str], there: Collection[str], where: str, method: str) -> None:
        """Check that ``names``, the columns of a dataset by their expected names, contain those of one format.

        Raises:
            DataError: columns are missing; it lists the columns ``there``, by their original names.
        """
        missing = [[name for name in form if name not in names] for form in self.formats]
        begun = [lacks for form, lacks in zip(self.formats, missing) if len(lacks) < len(form)]
        if least := min(begun or missing[:1], key=len):
            plural, needs = "s" if least[1:] else "", ", or ".join(" and ".join(form) for form in self.formats)
            raise DataError(
                f"{where}: missing column{plural} {listing(least)}; {method} requires {needs}; columns: "
                f"{listing(there)}; if your columns have other names, set column_map"
            )

    @abstractmethod
    def parse(self, row: Row, where: str, others: Row) -> Source:
        """Convert a row of any accepted format to text.

        Args:
            row: the row. Columns that only other rows use are null.
            where: name of the row in messages, such as ``data.jsonl, row 12``.
            others: the row's other columns, if ``keeps_columns``.

        Raises:
            DataError: the row is invalid.
        """

    def read_tokens(self, row: Row, columns: TokenColumns, where: str, tokenizer: RowTokenizer) -> Encoded:
        """Read a row that is already tokenized; see :meth:`parse`."""
        read = read_whole if self.whole else read_completions
        return tokenizer.with_context(read(row, columns, where, len(tokenizer.tokenizer)))

    def records(self, row: Encoded, limits: Limits, tokenizer: RowTokenizer) -> list[Record]:
        """Return the tokenized rows, truncated to the limits, that a row becomes: one, or one per completion.

        A row that is dropped has no tokens, but a reason.
        """
        whole, first = row.completions, row.prompt[: len(tokenizer.leading)]
        head = len(first) if first and first == tokenizer.leading else int(row.prompt[:1] == [tokenizer.bos])
        groups, further = [whole], [row.further]
        if self.divides:
            # Equal for equal prompts, however they are truncated, in every process and on every machine.
            digest = hashlib.blake2b(np.asarray(row.prompt, dtype="<i4").tobytes(), digest_size=8).digest()
            key = {"prompt_key": int.from_bytes(digest, "little", signed=True)}
            groups = [[completion] for completion in whole]
            further = [{name: each[i] for name, each in row.further.items()} | key for i in range(len(whole))]
        fits = [fit(row.prompt, group, limits, head, self.whole) for group in groups]
        answers = [ids for fitted in fits for ids in fitted.completions]
        pair = None
        if len(whole) > 1 and answers[0] == answers[1]:
            pair = IDENTICAL if whole[0] == whole[1] else CUT_ALIKE
        records = []
        for fitted, own in zip(fits, further):
            dropped = next(filter(None, (pair if pair == IDENTICAL else None, *fitted.reasons, pair)), None)
            kept = dropped is None
            ids = zip(("prompt_ids", *self.completions), (fitted.prompt, *fitted.completions))
            cut = {"prompt_cut": kept and fitted.prompt_cut, "completions_cut": sum(fitted.cut) if kept else 0}
            tokens = {name: value if kept else [] for name, value in ids}
            records.append({**own, **tokens, "dropped": dropped, **cut})
        return records

    @abstractmethod
    def collate(self, dataset: Dataset, plan: WindowPlan, micro: int, rank: int) -> AnyBatch:
        """Collate one rank's micro-batch ``micro`` of a plan."""
