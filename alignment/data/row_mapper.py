"""The function that ``Dataset.map`` runs to tokenize a batch of rows. Rows to be dropped are only marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Features, Json, Value

from alignment.config.errors import DataError
from alignment.data.kinds.base import Kind
from alignment.data.messages import without_nulls
from alignment.data.readers import LABELS
from alignment.data.tokenization import Encoded, RowTokenizer, Source
from alignment.data.truncation import Limits
from alignment.run.activity import ACTIVITY


class RowMapper:
    """The function for ``Dataset.map`` with ``with_indices``.

    Args:
        tokenizer: converts texts to token IDs.
        kind: kind of rows.
        limits: lengths in tokens.
        where: name of the data in messages.
        column_map: expected name of a column -> its name in the data.
        given: the columns with their types.
        others: the columns that the kind does not know and keeps.
    """

    def __init__(
        self,
        tokenizer: RowTokenizer,
        kind: Kind,
        limits: Limits,
        where: str,
        column_map: Mapping[str, str],
        given: Features,
        others: Sequence[str] = (),
    ) -> None:
        self.tokenizer, self.kind, self.limits = tokenizer, kind, limits
        self.where, self.column_map, self.others = where, column_map, others
        self.features = Features({**kind.features, "dropped": Value("string")})
        self._tokens = kind.tokens.find(given)
        # Arrow adds null entries so that all objects have the same keys; JSON columns are unchanged.
        self._filled = {name for name, feature in given.items() if not _holds_json(feature)} - {*others}

    def __call__(self, batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        ACTIVITY.progress()  # no effect in a worker process
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        read = [self._read(row, f"{self.where}, row {index + 1}") for row, index in zip(rows, indices, strict=True)]
        encoded = iter(self.kind.encode([one for one in read if isinstance(one, Source)], self.tokenizer))
        out: dict[str, list[Any]] = {name: [] for name in self.features}
        for index, one in zip(indices, read, strict=True):
            ids = next(encoded) if isinstance(one, Source) else one
            for record in self.kind.records(ids, self.limits, self.tokenizer):
                record["row"] = index
                for name, values in out.items():
                    values.append(record[name])
        return out

    def _read(self, row: dict[str, Any], place: str) -> Source | Encoded:
        """Read a row: as text, or as token IDs if it is already tokenized."""
        row = {key: without_nulls(value) if key in self._filled else value for key, value in row.items()}
        if "label" in self.column_map and isinstance(row["label"], str):  # CSV files have no types
            row["label"] = LABELS.get(row["label"].strip().lower(), row["label"])
        others = {name: row.pop(name) for name in self.others}
        try:
            if self._tokens is not None:
                return self.kind.read_tokens(row, self._tokens, place, self.tokenizer)
            return self.kind.parse(row, place, others)
        except DataError as error:
            if not self.column_map:
                raise
            renamed = ", ".join(f"{name}: {column}" for name, column in self.column_map.items())
            raise DataError(f"{error} (column_map: {renamed})") from None


def _holds_json(feature: Any) -> bool:
    """Return whether a column, or a feature nested in it, is JSON."""
    if isinstance(feature, Mapping):
        return any(map(_holds_json, feature.values()))
    return isinstance(feature, Json) or _holds_json(getattr(feature, "feature", {}))
