"""Tokenize a dataset once and cache it on disk, under a name that depends on everything that determines its content.

Processes that call :func:`prepare` at the same time get the same folder, which is created atomically.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset, Features, Json, Value
from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from alignment.config.errors import DataError, LabelError, OutputError, one_line, setting
from alignment.config.fields import value_text, words
from alignment.config.options_data import COLUMNS, MAPPED_COLUMNS
from alignment.data.columns import arranged
from alignment.data.kinds.base import Kind
from alignment.data.messages import NOTHING_SAID, Source, as_turns, without_nulls
from alignment.data.readers import LABELS
from alignment.data.report import DataReport, counts
from alignment.data.tokenization import Encoded, Limits, RowTokenizer
from alignment.internals.transformers import tokenizer_options
from alignment.run.activity import ACTIVITY

_TOKENS_VERSION = 7  # increase it if the same input is tokenized differently; part of what a resumed run compares
_FORMAT_VERSION = 2  # increase it if tokenized rows are stored differently
_ROWS = 1000  # rows hashed at a time; part of the hash
_BATCH = 256  # rows per call of the tokenizer
# Meanings of common labels, for which a ``label_map`` is proposed.
_MEANINGS = {
    **dict.fromkeys(words("1 yes y t up good positive like thumbs_up desirable accepted correct pass 👍 ✅"), "true"),
    **dict.fromkeys(words("0 -1 no n f down bad negative dislike thumbs_down undesirable rejected 👎 ❌"), "false"),
}
_MOST_LABELS = 8  # different labels that a proposal lists


def data_key(
    dataset: Dataset, kind: Kind, tokenizer: Any, limits: Limits, others: Sequence[str] = (), **reading: Any
) -> str:
    """Return the key of a tokenized dataset, such as ``preference-3f…``: a hash of everything that determines it.

    The content of the rows is hashed rather than the dataset's fingerprint: two processes that load the same file get
    the same name. ``others`` are kept columns that the kind does not know; ``reading`` affects how rows are read.
    """
    digest = hashlib.blake2b(digest_size=16)
    settings: dict[str, Any] = {"version": _TOKENS_VERSION, "kind": kind.name, "limits": asdict(limits)}
    settings |= {"tokenizer": describe_tokenizer(tokenizer)} | ({"extra": list(others)} if others else {})
    settings |= {name: value for name, value in reading.items() if value}
    if (rules := asdict(kind)) != {field.name: field.default for field in fields(kind)}:
        settings["rules"] = rules
    classes = [cls for cls in type(kind).__mro__ if issubclass(cls, Kind)]
    if own := [cls for cls in classes if not cls.__module__.startswith("alignment.")]:
        settings["code"] = [[cls.__qualname__, *_sources(cls)] for cls in own]
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    order = [*COLUMNS, *MAPPED_COLUMNS, *others]
    columns = sorted(dataset.column_names, key=lambda name: order.index(name) if name in order else len(order))
    for rows in dataset.select_columns(columns).with_format("arrow").iter(_ROWS):
        table, sink = rows.combine_chunks().replace_schema_metadata(None), pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        digest.update(memoryview(sink.getvalue()))
    return f"{kind.name}-{digest.hexdigest()}"


def _sources(cls: type) -> Iterator[str]:
    """Yield the source of a class's own functions, where it is available."""
    for value in vars(cls).values():
        with contextlib.suppress(OSError, TypeError):
            yield inspect.getsource(value)


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Return everything that determines how a tokenizer converts text to token IDs."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        for setting in ("truncation", "padding"):  # changed by every call of the tokenizer, but not used here
            content.pop(setting, None)
    else:
        content = {"vocab": sorted(tokenizer.get_vocab().items()), "options": tokenizer_options(tokenizer)}
    return {
        "class": type(tokenizer).__name__,
        "content": hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest(),
        "template": tokenizer.chat_template,
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, *sorted(tokenizer.all_special_ids)],
        "whole": list(tokenizer("a 1")["input_ids"]),
    }


@dataclass(frozen=True)
class Prepared:
    """Tokenized rows with :attr:`Kind.features` (``row`` is the source row, counted from 0), and their report."""

    dataset: Dataset
    report: DataReport


def prepare(
    dataset: Dataset,
    kind: Kind,
    tokenizer: Any,
    limits: Limits,
    where: str,
    cache_dir: Path,
    *,
    column_map: Mapping[str, str] | None = None,
    label_map: Mapping[str, bool] | None = None,
    apply_chat_template: bool = False,
    num_proc: int | None = None,
    progress: bool = True,
    strict: bool = False,
    method: str = "training",
) -> Path:
    """Validate, tokenize and truncate ``dataset``, and return the folder with the result, which may be cached.

    Args:
        dataset: rows of any accepted format.
        kind, tokenizer, limits: how they become token IDs.
        where: name of the data in messages, such as the file name.
        cache_dir: the folder in which the result's folder is created.
        column_map: expected name of a column -> its name in the dataset.
        label_map: label in the dataset, as text in lower case -> whether it means desirable.
        apply_chat_template: render rows of strings as one turn of the user and one of the assistant.
        num_proc: number of worker processes; does not affect the result.
        progress: whether to show a progress bar.
        strict: raise an error instead of dropping rows.
        method: name of the method in messages.

    Raises:
        DataError: a column is missing, a row is invalid, no rows are left, or (``strict``) rows would be dropped.
        OutputError: the folder cannot be written.
    """
    column_map = column_map or {}
    dataset, others = arranged(dataset, column_map, kind, where, method)
    if len(dataset) == 0:
        raise DataError(f"{where}: contains no rows; pass a dataset with rows")
    if apply_chat_template and kind.tokens.find(dataset.column_names) is not None:
        raise DataError(f"{where}: {setting('apply_chat_template', True)}: the rows are already tokenized; remove it")
    reading: Any = {"label_map": label_map, "apply_chat_template": apply_chat_template}
    target = cache_dir / f"{data_key(dataset, kind, tokenizer, limits, others, **reading)}.{_FORMAT_VERSION}"
    if target.is_dir():
        _check_report(_report(target), where, strict)
        return target
    rows, labels = RowTokenizer(tokenizer, whole=kind.whole), LABELS | dict(label_map or {})
    mapper = RowMapper(rows, kind, limits, where, column_map, dataset.features, others, labels, apply_chat_template)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _write(dataset, mapper, target, num_proc, progress, strict)
    except LabelError as error:
        raise DataError(f"{error}{_label_remedy(dataset, mapper.label_map)}") from None
    except OSError as error:
        raise OutputError(
            f"{cache_dir}: the tokenized data cannot be written: {one_line(error)}; free disk space or choose another "
            "folder"
        ) from error
    return target


def _write(dataset: Dataset, mapper: RowMapper, target: Path, num_proc: int | None, bars: bool, strict: bool) -> None:
    """Tokenize the rows, and write those that are kept, with a report, to ``target`` in one rename."""
    with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as scratch:
        with _progress_bars(bars):
            mapped = dataset.map(
                mapper,
                batched=True,
                batch_size=_BATCH,
                with_indices=True,
                remove_columns=dataset.column_names,
                features=mapper.features,
                num_proc=num_proc,
                cache_file_name=f"{scratch}/rows.arrow",
                load_from_cache_file=False,
                new_fingerprint=target.stem.rpartition("-")[2],  # avoids pickling the tokenizer
                desc="Tokenizing",
            )
        reasons = mapped.data.column("dropped").to_pylist()
        kept = mapped.select([index for index, reason in enumerate(reasons) if reason is None])
        dropped = dict(sorted(Counter(filter(None, reasons)).items()))
        report = DataReport(rows_in=len(reasons), dropped=dropped, **counts(kept))
        _check_report(report, mapper.where, strict)
        made = Path(scratch) / "made"
        with _progress_bars(False):
            kept.remove_columns("dropped").save_to_disk(str(made / "data"))
        (made / "report.json").write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
        try:
            made.rename(target)
        except OSError:  # if another process was faster, its identical folder is used
            if not target.is_dir():
                raise


def check_cache(folder: Path) -> None:
    """Check that the cache folder is writable (OutputError); ``datasets`` would report a problem with the data."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(
            f"{folder}: the datasets cache cannot be written: {error.strerror or error}; set HF_DATASETS_CACHE to "
            "another folder"
        ) from error


def load_prepared(path: Path) -> Prepared:
    """Load the result of :func:`prepare`; DataError if the folder is missing or corrupt."""
    try:
        dataset = datasets.load_from_disk(str(path / "data"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the tokenized data cannot be read: {one_line(error)}; delete the folder") from error
    return Prepared(dataset, _report(path))


def _report(folder: Path) -> DataReport:
    try:
        return DataReport(**json.loads((folder / "report.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{folder}: its report.json cannot be read: {one_line(error)}; delete the folder") from error


@dataclass
class RowMapper:
    """The function for ``Dataset.map`` of rows with the columns ``given``. Rows to be dropped are only marked."""

    tokenizer: RowTokenizer
    kind: Kind
    limits: Limits
    where: str
    column_map: Mapping[str, str]
    given: Features
    others: Sequence[str] = ()
    label_map: Mapping[str, bool] = field(default_factory=LABELS.copy)
    apply_chat_template: bool = False

    def __post_init__(self) -> None:
        self.features = Features({**self.kind.features, "dropped": Value("string")})
        self._tokens = self.kind.tokens.find(self.given)
        # Arrow adds null entries so that all objects have the same keys; JSON columns are unchanged.
        nested = {n for n, feature in self.given.items() if not (isinstance(feature, Value) or _holds_json(feature))}
        self._filled = nested - {*self.others}

    def __call__(self, batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        ACTIVITY.progress()  # no effect in a worker process
        read: list[Source | Encoded] = []  # rows as text, or as token IDs if they are already tokenized
        for index, values in zip(indices, zip(*batch.values(), strict=True), strict=True):
            row, place = dict(zip(batch, values, strict=True)), f"{self.where}, row {index + 1}"
            row |= {name: without_nulls(row[name]) for name in self._filled}
            others = {name: row.pop(name) for name in self.others}
            if isinstance(row.get("label"), (str, bool, int, float)):
                row["label"] = self.label_map.get(value_text(row["label"]).lower(), row["label"])
            try:
                if self._tokens is not None:
                    read.append(self.kind.read_tokens(row, self._tokens, place, self.tokenizer))
                else:
                    row = as_turns(row, place) if self.apply_chat_template else row
                    read.append(self.kind.parse(row, place, others))
            except DataError as error:
                if not self.column_map:
                    raise
                renamed = ", ".join(f"{name}: {column}" for name, column in self.column_map.items())
                raise type(error)(f"{error} (column_map: {renamed})") from None
        encoded = iter(self.tokenizer.encode([one for one in read if isinstance(one, Source)]))
        out: dict[str, list[Any]] = {name: [] for name in self.features}
        for index, one in zip(indices, read, strict=True):
            ids = next(encoded) if isinstance(one, Source) else one
            if self.apply_chat_template and isinstance(one, Source):  # an empty string has an end of turn here
                said = zip(ids.completions, one.completions, strict=True)
                ids = replace(ids, completions=[[] if text == NOTHING_SAID else tokens for tokens, text in said])
            for record in self.kind.records(ids, self.limits, self.tokenizer):
                record["row"] = index
                for name, column in out.items():
                    column.append(record[name])
        return out


def _label_remedy(dataset: Dataset, known: Mapping[str, bool]) -> str:
    """Return what to set for labels that are not ``known``, if any: a ``label_map`` for the values of the dataset."""
    values = {value_text(value): None for value in dataset["label"] if isinstance(value, (str, bool, int, float))}
    unknown = [value for value in values if value and value.lower() not in known]
    if not unknown and ("" in values or None in dataset["label"]):
        return "; remove rows without a label, or fill it in"
    if len(unknown) > _MOST_LABELS:
        return f"; the column has {len(values)} different values; map them to true and false, or set label_map"
    proposal = {label: value_text(meaning) for label, meaning in known.items() if label not in LABELS}
    meanings = _MEANINGS if all(value.lower() in _MEANINGS for value in unknown) else {}  # not of 1 in a rating
    proposal |= {value: meanings.get(value.lower(), "true|false") for value in unknown}
    return f"; set label_map, for example {','.join(map('='.join, proposal.items()))!r}" if unknown else ""


def _holds_json(feature: Any) -> bool:
    """Return whether a column, or a feature nested in it, is JSON."""
    nested = feature.values() if isinstance(feature, Mapping) else [getattr(feature, "feature", None)]
    return isinstance(feature, Json) or any(_holds_json(one) for one in nested if one is not None)


def _check_report(report: DataReport, where: str, strict: bool) -> None:
    if not report.rows_out:
        rows = "the only row was" if report.rows_in == 1 else f"all {report.rows_in} rows were"
        raise DataError(
            f"{where}: {rows} dropped ({report.drops()}); increase max_length (and decrease max_new_tokens if the "
            "policy generates completions), or fix the rows"
        )
    if strict and report.dropped:
        raise DataError(
            f"{where}: {sum(report.dropped.values())} of {report.rows_in} rows would be dropped ({report.drops()}); "
            "fix them, or set strict_data: false"
        )


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Hide the progress bars of the ``datasets`` library, without overriding the user's own setting."""
    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
