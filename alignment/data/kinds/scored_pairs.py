"""Pairs with the margin by which the chosen completion is better, for reward models."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
from datasets import Value

from alignment.config.errors import DataError, show
from alignment.data.kinds.pairs import Pairs
from alignment.data.messages import Row, Source
from alignment.data.targets import TokenColumns, TokenFormat
from alignment.data.tokenization import Encoded, RowTokenizer

_LARGEST = float(np.finfo(np.float32).max)


class ScoredPairs(Pairs):
    """A pair with a margin. Sequences are scored at their last token, so none needs context before its completion."""

    name = "preference_margin"
    optional = ("margin", *Pairs.optional)
    further = {"margin": Value("float32")}
    tokens = TokenFormat(("chosen_ids", "rejected_ids"), ("margin",), whole=True)
    whole = True

    def parse(self, row: Row, where: str, others: Row) -> Source:
        return replace(super().parse(row, where, others), further={"margin": margin_of(row, where)})

    def read_tokens(self, row: Row, columns: TokenColumns, where: str, tokenizer: RowTokenizer) -> Encoded:
        return replace(super().read_tokens(row, columns, where, tokenizer), further={"margin": margin_of(row, where)})


SCORED_PAIRS = ScoredPairs()


def margin_of(row: Row, where: str) -> float:
    """Return the margin of a pair: column ``margin``, or 0 if it is null, empty or missing.

    A string is parsed as a number, because CSV files only have strings. A list with one number, the format of TRL up
    to 0.23, is also accepted.

    Raises:
        DataError: the margin is not a finite number that fits in 32 bits.
    """
    given = row.get("margin")
    value = given[0] if isinstance(given, list) and len(given) == 1 else given
    if value is None or (isinstance(value, str) and not value.strip()):
        return 0.0
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, bool) and abs(float(value)) <= _LARGEST:
            return float(value)
    raise DataError(f"{where}: margin is {show(value)}; expected a finite number or null")
