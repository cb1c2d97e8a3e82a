"""From a PEFT adapter to a full Hugging Face folder: checked, merged on the host, written whole, and compared.

Nothing is partitioned here and no engine is built; one process does it, on the CPU. At no time are there two models:
the merge happens in the loaded base, and the exported folder is read again after that is gone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from alignment.config.errors import ModelError, OptionError, OutputError, first_line, setting
from alignment.engines.export_check import Samples, compare, dataset_samples, default_samples
from alignment.engines.export_check import outputs as measured
from alignment.engines.export_report import MergeReport, advice
from alignment.engines.saving import move_into, no_progress_bar, share_with_others
from alignment.internals.transformers import loading
from alignment.models.adapters.folder import AdapterFolder, read_adapter, task_name
from alignment.models.adapters.merge_base import base_config, check_match, load_base, trained_dtype
from alignment.models.adapters.merging import Rounding, finish, inject, merge, put_saved_tensors
from alignment.models.adapters.survival import SurvivalMeter

REPORT = "export_report.json"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Tell = Callable[[str], None]


def merge_adapter(
    adapter: Path,
    out: Path,
    *,
    dtype: str = "auto",
    base: str | None = None,
    revision: str | None = None,
    quantization: dict[str, Any] | None = None,
    samples: Samples | str | None = None,
    sample_count: int = 8,
    max_shard_size: str = "5GB",
    trust_remote_code: bool = False,
    tell: Tell = lambda line: None,
) -> MergeReport:
    """Write ``out`` as the model that the adapter and its base are together. For one process.

    Args:
        adapter: a folder as PEFT's ``save_pretrained`` writes it.
        out: a folder that does not exist or is empty.
        dtype: ``bfloat16``, ``float16``, ``float32``; ``auto`` for the one that the adapter was trained in if that is
            recorded, or else that of the base's checkpoint.
        base: folder or hub name of the base model; None for what the adapter names.
        revision: of the base model; None for what the adapter names.
        quantization: ``BitsAndBytesConfig.to_dict()`` of the weights that the adapter was trained on; None for what
            the folder records.
        samples: rows to compare outputs on, or the name of a dataset; None for built-in texts.
        sample_count: how many rows to take where ``samples`` does not give them; 0 leaves the comparison out.
        max_shard_size: of a weight file, such as ``5GB``.
        trust_remote_code: run code that comes with the base or the tokenizer.
        tell: is told of every step.

    Raises:
        OptionError: ``dtype`` or ``sample_count`` cannot be used.
        OutputError: ``out`` is not empty or cannot be written.
        ModelError: the adapter or its base cannot be used, or they do not match.
        DataError: the dataset of the samples cannot be used.
    """
    if dtype not in ("auto", *DTYPES):
        raise OptionError(f"{setting('dtype', dtype)}: must be one of auto, {', '.join(DTYPES)}")
    if sample_count < 0:
        raise OptionError(f"{setting('samples', sample_count)}: must be 0 or more")
    check_out(out)
    folder = read_adapter(adapter, base, revision)
    if quantization is not None:
        folder = replace(folder, quantization=quantization)
    config = base_config(folder, trust_remote_code)
    tokenizer = _tokenizer(folder, trust_remote_code)
    replaced = check_match(folder, config, trust_remote_code)
    target = DTYPES[dtype] if dtype != "auto" else trained_dtype(folder) or _dtype_of(config)
    rows = _samples(samples, sample_count, tokenizer, config)
    method = _method(folder, config)
    tell(f"base: {folder.base}, {folder.task.noun}; export in {_name(target)}")
    if method is not None:
        tell(f"the base was quantised ({method}): its dequantised weights are merged, not the original ones")

    rounding = Rounding(target, set(), SurvivalMeter())
    with _quiet():
        model, rounding.kept = load_base(folder, config, target, replaced, trust_remote_code)
        before, adapted = _merge_in_place(model, folder, replaced, rounding, rows, tell)
        with _written(out) as partial:
            tell(f"writing {out}")
            _save(model, tokenizer, partial, max_shard_size)
            kind = type(model)
            del model
            gc.collect()
            change = None
            if rows is not None:
                exported = measured(_reload(kind, folder, partial, trust_remote_code), rows, _is_classifier(folder))
                change = compare(rows, _what(folder), before, adapted, exported)
            report = MergeReport(
                str(adapter), folder.base, task_name(folder.task), _name(target), method, rounding.meter.tensors,
                rounding.meter.total, rounding.meter.worst, change, advice(change, _name(target)),
            )  # fmt: skip
            (partial / REPORT).write_text(report.json(), encoding="utf-8")
    return report


def check_out(out: Path) -> None:
    """Refuse a folder that has something in it, or cannot be written.

    Raises:
        OutputError: saying so.
    """
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} is a file; name a folder that does not exist yet")
    if out.is_dir() and any(out.iterdir()):
        raise OutputError(f"{out} is not empty; name a folder that does not exist yet, or empty this one")
    parent = next(one for one in (out.absolute(), *out.absolute().parents) if one.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{out} cannot be written: no permission to write in {parent}")


def _merge_in_place(
    model: PreTrainedModel,
    folder: AdapterFolder,
    replaced: set[str],
    rounding: Rounding,
    rows: Samples | None,
    tell: Tell,
) -> tuple[list[float], list[float]]:
    """Merge the adapter into ``model``; what the base, and the adapter on it, made of the rows before that."""
    before: list[float] = []
    adapted: list[float] = []
    classifier = _is_classifier(folder)
    if rows is not None and not classifier:
        before = measured(model, rows, classifier)
    put_saved_tensors(model, folder, replaced, rounding)
    if rows is not None and classifier:  # a base without a head has one only now
        before = measured(model, rows, classifier)
    injected = inject(model, folder)
    if rows is not None:
        adapted = measured(model, rows, classifier)
    merge(injected, rounding, lambda number, of: tell(f"merged {number} of {of} layers") if number == of else None)
    finish(injected, rounding)
    return before, adapted


def _reload(kind: type, folder: AdapterFolder, path: Path, trust_remote_code: bool) -> PreTrainedModel:
    with loading(None):
        model: PreTrainedModel = folder.task.auto.from_pretrained(
            path, dtype="auto", trust_remote_code=trust_remote_code
        )
    return model.eval()


def _save(model: PreTrainedModel, tokenizer: Any, folder: Path, max_shard_size: str) -> None:
    try:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    except (ValueError, SafetensorError) as error:  # a generation config that contradicts itself, for one
        raise OutputError(f"the merged model cannot be written: {first_line(error)}") from error
    share_with_others(folder)


@contextlib.contextmanager
def _written(out: Path) -> Iterator[Path]:
    """A hidden folder that takes the place of ``out`` when the context ends without an error.

    Where ``out`` exists it is inside it, because ``out`` may be a mount point: only there is a move a rename.
    """
    name = f".{out.absolute().name}.{uuid.uuid4().hex[:8]}.partial"
    partial = out / name if out.exists() else out.absolute().parent / name
    try:
        partial.mkdir(parents=True)
        yield partial
        move_into(partial, out)
    except OSError as error:
        raise OutputError(f"{out} could not be written: {error.strerror or first_line(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _tokenizer(folder: AdapterFolder, trust_remote_code: bool) -> Any:
    """The adapter's own tokenizer, or else the base's; None where neither has one."""
    where = str(folder.path) if folder.has_tokenizer else folder.base
    revision = None if folder.has_tokenizer else folder.revision
    try:
        return AutoTokenizer.from_pretrained(where, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # each library has its own classes for one broken file
        if folder.has_tokenizer or (Path(where) / "tokenizer_config.json").is_file():
            raise ModelError(f"{where}: its tokenizer cannot be loaded: {first_line(error)}") from error
        return None


def _samples(given: Samples | str | None, count: int, tokenizer: Any, config: PretrainedConfig) -> Samples | None:
    if isinstance(given, Samples) or count == 0:
        return given if isinstance(given, Samples) else None
    vocabulary = config.get_text_config().vocab_size
    if given is None:
        return default_samples(tokenizer, vocabulary, count)
    if tokenizer is None:
        raise OptionError(f"{setting('dataset_name', given)}: neither adapter nor base has a tokenizer; leave it out")
    return dataset_samples(given, tokenizer, vocabulary, count)


def _dtype_of(config: PretrainedConfig) -> torch.dtype:
    dtype = getattr(config, "dtype", None)
    return next((one for one in DTYPES.values() if one == dtype), torch.bfloat16)


def _method(folder: AdapterFolder, config: PretrainedConfig) -> str | None:
    """How the weights were quantised that the adapter was trained on, in words."""
    given = getattr(config, "quantization_config", None) or folder.quantization
    if given is None:
        return None
    given = given if isinstance(given, dict) else given.to_dict()
    return f"4 bits, {given.get('bnb_4bit_quant_type', 'fp4')}" if given.get("load_in_4bit") else "8 bits"


def _is_classifier(folder: AdapterFolder) -> bool:
    return task_name(folder.task) == "classifier"


def _what(folder: AdapterFolder) -> str:
    return "score" if _is_classifier(folder) else "log-prob per token"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the libraries' bars and remarks on loading, dequantising and untying, which are reported here."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with no_progress_bar(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
