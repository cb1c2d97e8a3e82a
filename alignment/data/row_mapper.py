"""The function that ``Dataset.map`` runs to tokenize a batch of rows. Rows to be dropped are only marked."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Features, Json, List, Value

from alignment.config.errors import DataError
from alignment.data.formats import (
    Kind,
    Text,
    label_of,
    margin_of,
    preference_row,
    prompt_completion_row,
    prompt_only_row,
    unpaired_rows,
)
from alignment.data.json_columns import STORED, stored_prompt
from alignment.data.messages import CUT_ALIKE, IDENTICAL, DropRow, without_nulls
from alignment.data.targets.rules import USUAL, RowRules, divided
from alignment.data.targets.tokenized import learned_row, read_completions, read_ids, token_columns
from alignment.data.targets.turns import assistant_mask
from alignment.data.tokenization import Encoded, RowTokenizer, Source, common_length
from alignment.data.truncation import Fitted, Limits, fit, fit_prompt
from alignment.run.activity import ACTIVITY

_IDS = List(Value("int32"))
TRUNCATED = {"prompt_cut": Value("bool"), "completions_cut": Value("int8")}
BOOKKEEPING = {"dropped": Value("string"), **TRUNCATED}
_PAIR = Features({"prompt_ids": _IDS, "chosen_ids": _IDS, "rejected_ids": _IDS, "row": Value("int64")})
FEATURES: dict[Kind, Features] = {
    "unpaired_preference": Features(
        {
            "prompt_ids": _IDS,
            "completion_ids": _IDS,
            "label": Value("bool"),
            "prompt_key": Value("int64"),
            "row": Value("int64"),
        }
    ),
    "preference": _PAIR,
    "preference_margin": Features({**_PAIR, "margin": Value("float32")}),
    "prompt_completion": Features(
        {
            "prompt_ids": _IDS,
            "completion_ids": _IDS,
            "scored": List(Value("bool")),  # mask of completion tokens in the loss; null for all
            "first": Value("bool"),  # whether labels include the first token, which is never in the loss
            "row": Value("int64"),
        }
    ),
    "prompt_only": Features({"prompt_ids": _IDS, **STORED, "row": Value("int64")}),
}
_COMPLETIONS = ("completion_ids", "chosen_ids", "rejected_ids")
_LABELS = {"true": True, "false": False}


def prompt_key(prompt: list[int]) -> int:
    """Return an int64 hash of a prompt's token IDs that is the same in every process and on every machine."""
    digest = hashlib.blake2b(np.asarray(prompt, dtype="<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _holds_json(feature: Any) -> bool:
    """Return whether a column, or a feature nested in it, is JSON."""
    if isinstance(feature, Mapping):
        return any(map(_holds_json, feature.values()))
    return isinstance(feature, Json) or _holds_json(getattr(feature, "feature", {}))


@dataclass
class _Job:
    """A source row being processed; its completions have the same prompt.

    ``labels`` is only used for KTO; ``stored`` has the columns of the result other than token IDs. ``ids`` are the
    token IDs of a row that is already tokenized. ``whole`` means that the loss includes the prompt; ``scored`` is the
    mask of the completion tokens in the loss.
    """

    row: int
    source: Source | None
    labels: list[bool]
    dropped: str | None = None
    stored: dict[str, Any] = field(default_factory=dict)
    ids: Encoded | None = None
    whole: bool = False
    scored: list[bool] | None = None
    first: bool = False


class RowMapper:
    """The function for ``Dataset.map`` with ``with_indices``.

    Args:
        tokenizer: converts texts to token IDs.
        kind: kind of rows.
        limits: lengths in tokens.
        where: name of the data in messages.
        column_map: expected name of a column -> its name in the data.
        given: the columns with their types.
        extra: the columns that are only passed to reward functions.
        rules: which tokens contribute to the loss.
    """

    def __init__(
        self,
        tokenizer: RowTokenizer,
        kind: Kind,
        limits: Limits,
        where: str,
        column_map: Mapping[str, str],
        given: Features,
        extra: Sequence[str] = (),
        rules: RowRules = USUAL,
    ) -> None:
        self.tokenizer, self.kind, self.limits, self.rules = tokenizer, kind, limits, rules
        self._tokens = token_columns(kind, given)
        self.where, self.column_map, self.extra = where, column_map, extra
        self.features = Features({**FEATURES[kind], **BOOKKEEPING})
        # Arrow adds null entries so that all objects have the same keys; JSON columns are unchanged.
        self._filled = {name for name, feature in given.items() if not _holds_json(feature)} - {*extra}

    def __call__(self, batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        ACTIVITY.progress()  # no effect in a worker process
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        jobs = [self._job(row, index) for row, index in zip(rows, indices, strict=True)]
        encoded = iter(self.tokenizer.encode([job.source for job in jobs if job.source is not None]))
        out: dict[str, list[Any]] = {name: [] for name in self.features}
        for job in jobs:
            ids = next(encoded) if job.source is not None else job.ids
            for record in self._records(job, ids):
                for name, values in out.items():
                    values.append(record[name])
        return out

    def _fitted(self, job: _Job, ids: Encoded) -> Fitted:
        """Return a row's token IDs, truncated to the limits."""
        if self.kind == "prompt_only":
            return fit_prompt(ids.prompt, self.limits)
        if self.kind == "prompt_completion" and job.source is not None:
            ids = self._learned(job, job.source, ids)
        # A reward is computed at the end of a sequence, so the first token needs no context.
        alone = self.kind == "preference_margin"
        return fit(ids.prompt, ids.completions, self.limits, self.tokenizer.head_length(ids.prompt), alone)

    def _learned(self, job: _Job, source: Source, ids: Encoded) -> Encoded:
        """Split a row for SFT before the first token in the loss."""
        if not (job.whole or self.rules.assistant_only):
            return ids
        sequence = [*ids.prompt, *ids.completions[0]]
        learned = [True] * len(sequence)
        if self.rules.assistant_only:
            learned = assistant_mask(self.tokenizer, source, sequence)
        if not job.whole:
            learned = [place >= len(ids.prompt) and value for place, value in enumerate(learned)]
        found = divided(sequence, learned)
        job.scored, job.first = found.scored, found.first
        return Encoded(found.prompt, [found.completion])

    def _job(self, row: dict[str, Any], index: int) -> _Job:
        place = f"{self.where}, row {index + 1}"
        row = {key: without_nulls(value) if key in self._filled else value for key, value in row.items()}
        if "label" in self.column_map and isinstance(row["label"], str):  # CSV files have no types
            row["label"] = _LABELS.get(row["label"].strip().lower(), row["label"])
        try:
            return self._checked_job(row, index, place)
        except DataError as error:
            renamed = ", ".join(f"{name}: {column}" for name, column in self.column_map.items())
            if not renamed:
                raise
            raise DataError(f"{error} (column_map: {renamed})") from None

    def _tokenized_job(self, row: dict[str, Any], index: int, place: str) -> _Job:
        """Create the job of a row with token IDs."""
        assert self._tokens is not None
        vocabulary = len(self.tokenizer.tokenizer)
        if self.kind == "prompt_completion":
            found = learned_row(row, self._tokens, self.rules, place, vocabulary)
            ids = Encoded(found.prompt, [found.completion])
            return _Job(index, None, [], ids=ids, scored=found.scored, first=found.first)
        if self.kind == "preference_margin":
            whole = read_ids(row, self._tokens, place, vocabulary)
            room = min(map(len, whole)) - 1  # each completion keeps at least one token
            shared = common_length(whole[0][: max(room, 0)], whole)
            ids = Encoded(whole[0][:shared], [each[shared:] for each in whole])
            return _Job(index, None, [], stored={"margin": margin_of(row, place)}, ids=ids)
        prompt, *completions = read_completions(self.kind, row, self._tokens, place, vocabulary)
        labels = [label_of(row, place)] if self.kind == "unpaired_preference" else []
        return _Job(index, None, labels, ids=self.tokenizer.with_context(prompt, completions))

    def _checked_job(self, row: dict[str, Any], index: int, place: str) -> _Job:
        if self._tokens is not None:
            return self._tokenized_job(row, index, place)
        if self.kind == "prompt_only":
            extra = {name: row.pop(name) for name in self.extra}
            alone = prompt_only_row(row, place)
            source = Source(alone.prompt, (), place, alone.template)
            return _Job(index, source, [], stored=stored_prompt(alone, extra, place))
        stored = {"margin": margin_of(row, place)} if self.kind == "preference_margin" else {}
        try:
            if self.kind in ("preference", "preference_margin"):
                pair = preference_row(row, place)
                source = Source(pair.prompt, (pair.chosen, pair.rejected), place, pair.template)
                return _Job(index, source, [], stored=stored)
            if self.kind == "prompt_completion":
                one = prompt_completion_row(row, place, self.rules.completion_only)
                return _Job(index, Source(one.prompt, (one.completion,), place, one.template), [], whole=one.whole)
            rows = unpaired_rows(row, place)
        except DropRow as drop:
            return _Job(index, None, [True, False], drop.reason, stored)  # only pairs are dropped here
        completions: tuple[Text, ...] = tuple(one.completion for one in rows)
        return _Job(index, Source(rows[0].prompt, completions, place, rows[0].template), [one.label for one in rows])

    def _records(self, job: _Job, ids: Encoded | None) -> Iterator[dict[str, Any]]:
        """Yield one record per label for KTO, each truncated by itself, otherwise one record for the row."""
        prompt, whole = ([], []) if ids is None else (ids.prompt, ids.completions)
        if self.kind == "unpaired_preference":
            fits = [self._fitted(job, Encoded(prompt, [completion])) for completion in whole]
            alike = _alike(whole, [fitted.completions[0] for fitted in fits])
            for label, fitted in itertools.zip_longest(job.labels, fits):  # no IDs if the pair is dropped
                record, kept = self._record(job, fitted, alike)
                yield record | {
                    "completion_ids": kept.completions[0] if kept else [],
                    "label": label,
                    "prompt_key": prompt_key(prompt),  # the same however it is truncated
                }
            return
        row = None if ids is None else self._fitted(job, ids)
        record, kept = self._record(job, row, None if row is None else _alike(whole, row.completions))
        names = [name for name in _COMPLETIONS if name in self.features]
        if "scored" in self.features:
            record["first"] = job.first
            record["scored"] = None if job.scored is None or not kept else job.scored[: len(kept.completions[0])]
        yield record | job.stored | {name: kept.completions[i] if kept else [] for i, name in enumerate(names)}

    def _record(self, job: _Job, fitted: Fitted | None, alike: str | None) -> tuple[dict[str, Any], Fitted | None]:
        """Return the fields that all kinds have, and the IDs unless a completion or the pair is dropped."""
        reasons = [job.dropped] if fitted is None else fitted.reasons
        dropped = next((reason for reason in (*reasons, alike) if reason), None)
        kept = None if dropped else fitted
        record = {
            "prompt_ids": kept.prompt if kept else [],
            "row": job.row,
            "dropped": dropped,
            "prompt_cut": bool(kept and kept.prompt_cut),
            "completions_cut": sum(kept.cut) if kept else 0,
        }
        return record, kept


def _alike(whole: Sequence[list[int]], fitted: Sequence[list[int]]) -> str | None:
    """Return why a pair must be dropped: its completions are identical, as they are or truncated."""
    if len(whole) < 2 or fitted[0] != fitted[1]:
        return None
    return IDENTICAL if whole[0] == whole[1] else CUT_ALIKE
