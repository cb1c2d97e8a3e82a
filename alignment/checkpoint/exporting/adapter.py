"""Export of a PEFT adapter as a full Hugging Face folder: checked, merged on the host, written and compared.

Nothing is partitioned and no engine is built; a single process does all of it on the CPU. There are never two models
in memory: the adapter is merged into the loaded base, and the export is reloaded after the base has been freed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PretrainedConfig, PreTrainedModel

from alignment.checkpoint.exporting.card import write_card
from alignment.checkpoint.exporting.check import Samples, compare
from alignment.checkpoint.exporting.check import outputs as measured
from alignment.checkpoint.exporting.folder import (
    DTYPES,
    REPORT,
    Tell,
    check_options,
    dtype_name,
    load_tokenizer,
    quiet,
    sample_rows,
    save,
    written,
)
from alignment.checkpoint.exporting.masters import put_masters
from alignment.checkpoint.exporting.report import MergeReport, advice
from alignment.checkpoint.exporting.source import check_manifest, checked_masters, file_dtype
from alignment.internals.transformers import loading
from alignment.models.adapters.folder import AdapterFolder, read_adapter, task_name
from alignment.models.adapters.merge_base import base_config, check_match, load_base, trained_dtype
from alignment.models.adapters.merging import Rounding, finish, inject, merge, put_saved_tensors
from alignment.models.adapters.survival import SurvivalMeter


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
    """Write the adapter merged into its base model to ``out``. For a single process.

    Args:
        adapter: a folder in the format of PEFT's ``save_pretrained``.
        out: a folder that does not exist or is empty.
        dtype: ``bfloat16``, ``float16`` or ``float32``; ``auto`` for the dtype that the adapter was trained in, if
            recorded, otherwise that of the base's checkpoint.
        base: folder or Hub name of the base model; None for the one recorded in the adapter.
        revision: revision of the base model; None for the one recorded in the adapter.
        quantization: ``BitsAndBytesConfig.to_dict()`` of the weights that the adapter was trained on; None for the one
            recorded in the folder.
        samples: rows to compare outputs on, or the name of a dataset; None for built-in texts.
        sample_count: number of rows if ``samples`` does not list them; 0 skips the comparison.
        max_shard_size: maximum size of a weight file, such as ``5GB``.
        trust_remote_code: run code that comes with the base or the tokenizer.
        tell: called with a message for every step.

    Raises:
        OptionError: ``dtype``, ``sample_count`` or ``max_shard_size`` is invalid.
        OutputError: ``out`` is not empty or cannot be written.
        ModelError: the adapter or its base cannot be used, or they do not match.
        CheckpointError: a file of a checkpoint has changed since it was written.
        DataError: the dataset of the samples cannot be used.
    """
    shard_bytes = check_options(dtype, sample_count, max_shard_size, out)
    manifest = check_manifest(adapter)
    folder = read_adapter(adapter, base, revision)
    if quantization is not None:
        folder = replace(folder, quantization=quantization)
    config = base_config(folder, trust_remote_code)
    tokenizer = _tokenizer(folder, trust_remote_code)
    replaced = check_match(folder, config, trust_remote_code)
    target = DTYPES[dtype] if dtype != "auto" else trained_dtype(folder) or _dtype_of(config)
    stored = file_dtype(folder.weights)
    wide = target == torch.float32 and stored != torch.float32
    masters = checked_masters(adapter, manifest) if wide else iter(())
    rows = sample_rows(samples, sample_count, tokenizer, config)
    method = _method(folder, config)
    tell(f"base: {folder.base}, {folder.task.noun}; exporting in {dtype_name(target)}")
    if method is not None:
        tell(f"the base was quantized ({method}): its dequantized weights are merged, not the original ones")

    def put(injected: PeftModel) -> int:
        return put_masters(injected.get_base_model(), masters, stored, adapter)

    rounding = Rounding(target, set(), SurvivalMeter())
    with quiet():
        model, rounding.kept = load_base(folder, config, target, replaced, trust_remote_code)
        before, adapted, put_count = _merge_in_place(model, folder, replaced, rounding, rows, put, tell)
        with written(out) as partial:
            tell(f"writing {out}")
            save(model, tokenizer, partial, shard_bytes)
            del model
            gc.collect()
            change = None
            if rows is not None:
                exported = measured(_reload(folder, partial, trust_remote_code), rows, _is_classifier(folder))
                change = compare(rows, _what(folder), before, adapted, exported)
            report = MergeReport(
                adapter.absolute().name, folder.base, task_name(folder.task), dtype_name(target), method,
                rounding.meter.tensors, rounding.meter.total, rounding.meter.worst, put_count, change,
                advice(change, dtype_name(target)),
            )  # fmt: skip
            (partial / REPORT).write_text(report.json(), encoding="utf-8")
            write_card(partial, adapter, manifest, report, folder.base, out.absolute().name)
    return report


def _merge_in_place(
    model: PreTrainedModel,
    folder: AdapterFolder,
    replaced: set[str],
    rounding: Rounding,
    rows: Samples | None,
    put: Callable[[PeftModel], int],
    tell: Tell,
) -> tuple[list[float], list[float], int]:
    """Merge the adapter into ``model``; return the outputs of the base, and of the adapter on it, before the merge.

    ``put`` sets the adapter's master weights; the last value is their number.
    """
    before: list[float] = []
    adapted: list[float] = []
    classifier = _is_classifier(folder)
    if rows is not None and not classifier:
        before = measured(model, rows, classifier)
    put_saved_tensors(model, folder, replaced, rounding)
    if rows is not None and classifier:  # a base without a head gets it only now
        before = measured(model, rows, classifier)
    injected = inject(model, folder)
    masters = put(injected)
    if rows is not None:
        adapted = measured(model, rows, classifier)
    merge(injected, rounding, lambda number, of: tell(f"merged {number} of {of} layers") if number == of else None)
    finish(injected, rounding)
    return before, adapted, masters


def _reload(folder: AdapterFolder, path: Path, trust_remote_code: bool) -> PreTrainedModel:
    with loading(None):
        model: PreTrainedModel = folder.task.auto.from_pretrained(
            path, dtype="auto", trust_remote_code=trust_remote_code
        )
    return model.eval()


def _tokenizer(folder: AdapterFolder, trust_remote_code: bool) -> Any:
    """The adapter's own tokenizer, otherwise the base's; None if neither has one."""
    where = str(folder.path) if folder.has_tokenizer else folder.base
    revision = None if folder.has_tokenizer else folder.revision
    return load_tokenizer(where, revision, trust_remote_code, needed=folder.has_tokenizer)


def _dtype_of(config: PretrainedConfig) -> torch.dtype:
    dtype = getattr(config, "dtype", None)
    return next((one for one in DTYPES.values() if one == dtype), torch.bfloat16)


def _method(folder: AdapterFolder, config: PretrainedConfig) -> str | None:
    """The quantization of the weights that the adapter was trained on, as text."""
    given = getattr(config, "quantization_config", None) or folder.quantization
    if given is None:
        return None
    given = given if isinstance(given, dict) else given.to_dict()
    return f"4 bits, {given.get('bnb_4bit_quant_type', 'fp4')}" if given.get("load_in_4bit") else "8 bits"


def _is_classifier(folder: AdapterFolder) -> bool:
    return task_name(folder.task) == "classifier"


def _what(folder: AdapterFolder) -> str:
    return "score" if _is_classifier(folder) else "log-prob per token"
