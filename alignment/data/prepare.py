"""Tokenise a dataset once and keep it on disk, named by everything that its content depends on.

One process calls :func:`prepare` and the others wait, or all call it: the result is the same folder, which appears
whole or not at all. :func:`load_prepared` reads it.
"""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Features, List, Value
from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from alignment.config.errors import DataError, ModelError, OutputError
from alignment.data.cache_key import cache_name
from alignment.data.formats import COLUMNS, Kind, Text, check_columns, pair_row, unpaired_rows
from alignment.data.prompts import DropRow
from alignment.data.report import DataReport
from alignment.data.tokenization import RowTokenizer, Source
from alignment.data.truncation import Fitted, Limits, fit
from alignment.data.wording import one_line

_BATCH = 256  # rows per call of the tokenizer
_IDS = List(Value("int32"))
_BOOKKEEPING = {"dropped": Value("string"), "prompt_cut": Value("bool"), "completions_cut": Value("int8")}
FEATURES: dict[Kind, Features] = {
    "unpaired": Features(
        {
            "prompt_ids": _IDS,
            "completion_ids": _IDS,
            "label": Value("bool"),
            "prompt_key": Value("int64"),
            "row": Value("int64"),
        }
    ),
    "paired": Features({"prompt_ids": _IDS, "chosen_ids": _IDS, "rejected_ids": _IDS, "row": Value("int64")}),
}


@dataclass(frozen=True)
class Prepared:
    """Tokenised rows (columns as in :data:`FEATURES`; ``row`` is the source row, counted from 0) and their report."""

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
    num_proc: int | None = None,
    progress: bool = True,
    strict: bool = False,
) -> Path:
    """Check, tokenise and cut ``dataset``; return the folder that holds the result, at once if it exists already.

    Args:
        dataset: rows of any accepted format.
        kind: ``unpaired`` (KTO) or ``paired`` (CPO).
        tokenizer: a tokenizer of transformers.
        limits: lengths in tokens.
        where: names the data in messages, such as the file's name.
        cache_dir: the folder to make the result's own folder in; made where it does not exist.
        num_proc: worker processes; has no influence on the result.
        progress: whether to show a progress bar.
        strict: refuse to drop rows.

    Raises:
        DataError: missing columns, a faulty row, nothing left, or (``strict``) anything dropped.
        OutputError: the folder cannot be written.
    """
    check_columns(dataset.column_names, kind, where)
    if len(dataset) == 0:
        raise DataError(f"{where}: holds no rows; give a dataset that has some")
    dataset = dataset.with_format(None).select_columns([name for name in COLUMNS if name in dataset.column_names])
    target = cache_dir / cache_name(dataset, kind, tokenizer, limits)
    if target.is_dir():
        _check_report(_read_report(target), where, strict)
        return target
    mapper = _Mapper(RowTokenizer(tokenizer), kind, limits, where)
    work = cache_dir / f".{target.name.removeprefix(kind + '-')}.{uuid.uuid4().hex[:8]}"
    try:
        work.mkdir(parents=True)
        _build(dataset, mapper, work, num_proc, progress, strict)
        _publish(work, target)
    except OSError as error:
        raise OutputError(
            f"{cache_dir}: the tokenised data cannot be written: {one_line(error)}; free some space or choose another"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def load_prepared(path: Path) -> Prepared:
    """Read what :func:`prepare` wrote.

    Raises:
        DataError: the folder is missing or damaged.
    """
    try:
        dataset = datasets.load_from_disk(str(path / "data"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the tokenised data cannot be read: {one_line(error)}; delete the folder") from error
    return Prepared(dataset, _read_report(path))


def check_vocabulary(tokenizer: Any, vocab_size: int, model: str = "the model") -> None:
    """Check that every token id has an embedding. ``vocab_size``: rows of the embedding of ``model``.

    Raises:
        ModelError: the tokenizer knows more tokens than the model.
    """
    size = len(tokenizer)
    if size > vocab_size:
        raise ModelError(
            f"the tokenizer has {size} tokens but {model}'s vocab_size is {vocab_size}; "
            f"use the model's own tokenizer, or resize the embeddings to {size} and save the model"
        )


def prompt_key(prompt: list[int]) -> int:
    """A hash of a prompt's ids that fits int64 and is the same in every process and on every machine."""
    digest = hashlib.blake2b(np.asarray(prompt, dtype="<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclass
class _Job:
    """One source row on its way: its completions share a prompt. ``labels`` is empty for pairs."""

    row: int
    source: Source | None
    labels: list[bool]
    dropped: str | None = None


class _Mapper:
    """The function that ``Dataset.map`` runs: a batch of rows to tokenised rows, the dropped ones still among them."""

    def __init__(self, tokenizer: RowTokenizer, kind: Kind, limits: Limits, where: str) -> None:
        self.tokenizer, self.kind, self.limits, self.where = tokenizer, kind, limits, where
        self.features = Features({**FEATURES[kind], **_BOOKKEEPING})

    def __call__(self, batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        jobs = [self._job(row, index) for row, index in zip(rows, indices, strict=True)]
        encoded = iter(self.tokenizer.encode([job.source for job in jobs if job.source is not None]))
        out: dict[str, list[Any]] = {name: [] for name in self.features}
        for job in jobs:
            fitted = None
            if job.source is not None:
                ids = next(encoded)
                fitted = fit(ids.prompt, ids.completions, self.limits, self.tokenizer.head_length(ids.prompt))
            for record in self._paired(job, fitted) if self.kind == "paired" else self._unpaired(job, fitted):
                for name, values in out.items():
                    values.append(record[name])
        return out

    def _job(self, row: dict[str, Any], index: int) -> _Job:
        place = f"{self.where} row {index + 1}"
        try:
            if self.kind == "paired":
                pair = pair_row(row, place)
                return _Job(index, Source(pair.prompt, (pair.chosen, pair.rejected), place, pair.template), [])
            rows = unpaired_rows(row, place)
        except DropRow as drop:
            return _Job(index, None, [True, False], drop.reason)  # only pairs are dropped here
        completions: tuple[Text, ...] = tuple(one.completion for one in rows)
        return _Job(index, Source(rows[0].prompt, completions, place, rows[0].template), [one.label for one in rows])

    def _paired(self, job: _Job, fitted: Fitted | None) -> Iterator[dict[str, Any]]:
        dropped = job.dropped if fitted is None else next((reason for reason in fitted.reasons if reason), None)
        kept = None if dropped else fitted
        yield {
            "prompt_ids": kept.prompt if kept else [],
            "chosen_ids": kept.completions[0] if kept else [],
            "rejected_ids": kept.completions[1] if kept else [],
            "row": job.row,
            "dropped": dropped,
            "prompt_cut": bool(kept and kept.prompt_cut),
            "completions_cut": sum(kept.cut) if kept else 0,
        }

    def _unpaired(self, job: _Job, fitted: Fitted | None) -> Iterator[dict[str, Any]]:
        for number, label in enumerate(job.labels):
            dropped = job.dropped if fitted is None else fitted.reasons[number]
            kept = None if dropped else fitted
            prompt = kept.prompt if kept else []
            yield {
                "prompt_ids": prompt,
                "completion_ids": kept.completions[number] if kept else [],
                "label": label,
                "prompt_key": prompt_key(prompt),
                "row": job.row,
                "dropped": dropped,
                "prompt_cut": bool(kept and kept.prompt_cut),
                "completions_cut": int(kept.cut[number]) if kept else 0,
            }


def _build(dataset: Dataset, mapper: _Mapper, work: Path, num_proc: int | None, progress: bool, strict: bool) -> None:
    """Fill ``work`` with the kept rows and the report."""
    scratch = work / "scratch"
    scratch.mkdir()
    with _progress_bars(progress):
        mapped = dataset.map(
            mapper,
            batched=True,
            batch_size=_BATCH,
            with_indices=True,
            remove_columns=dataset.column_names,
            features=mapper.features,
            num_proc=num_proc,
            cache_file_name=str(scratch / "rows.arrow"),
            load_from_cache_file=False,
            new_fingerprint=work.name.split(".")[1],  # given, or the tokenizer would be pickled to make one
            desc="Tokenizing",
        )
    reasons = mapped.data.column("dropped").to_pylist()
    keep = [index for index, reason in enumerate(reasons) if reason is None]
    kept = mapped.select(keep)
    report = _report(mapper.kind, reasons, kept)
    _check_report(report, mapper.where, strict)
    with _progress_bars(False):
        kept.remove_columns(list(_BOOKKEEPING)).save_to_disk(str(work / "data"))
    report.save(work / "report.json")
    del mapped, kept
    shutil.rmtree(scratch)


def _report(kind: Kind, reasons: list[str | None], kept: Dataset) -> DataReport:
    labels = kept["label"][:] if kind == "unpaired" else []
    return DataReport(
        rows_in=len(reasons),
        rows_out=len(kept),
        dropped=dict(sorted(Counter(reason for reason in reasons if reason is not None).items())),
        prompts_cut=sum(kept["prompt_cut"][:]),
        completions_cut=sum(kept["completions_cut"][:]),
        desirable=sum(labels),
        undesirable=len(labels) - sum(labels),
    )


def _read_report(path: Path) -> DataReport:
    try:
        return DataReport.load(path / "report.json")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: its report.json cannot be read: {one_line(error)}; delete the folder") from error


def _check_report(report: DataReport, where: str, strict: bool) -> None:
    if not report.rows_out:
        raise DataError(
            f"{where}: none of the {report.rows_in} rows is left ({report.drops()}); raise max_length or mend the rows"
        )
    if strict and report.dropped:
        raise DataError(
            f"{where}: {sum(report.dropped.values())} of {report.rows_in} rows would be dropped ({report.drops()}); "
            "mend them, or set strict_data to false"
        )


def _publish(work: Path, target: Path) -> None:
    """Give the finished folder its name, unless another process was first: then theirs is as good."""
    try:
        work.rename(target)
    except OSError:
        if not target.is_dir():
            raise


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Hide the bars of the ``datasets`` library where they are not wanted; a user's own setting is never undone."""
    hide = not shown and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            enable_progress_bars()
