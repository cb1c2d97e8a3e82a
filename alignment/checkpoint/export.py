"""Export of a checkpoint, a model or an adapter as a full Hugging Face model folder.

A single process does it in host memory, without engines: it checks the source, loads it (an adapter is merged into its
base), computes log-probs of sample rows, writes the export, loads that and compares its log-probs. There are never two
models in memory.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from alignment.checkpoint.card import card_of
from alignment.checkpoint.comparison import Rows, outputs, sample_rows
from alignment.checkpoint.masters import Masters, checked_masters, put_masters
from alignment.checkpoint.run_folder import REPORT, check_output_folder, set_aside
from alignment.checkpoint.saving import no_progress_bar, written_folder
from alignment.config.errors import AlignmentError, ModelError, OptionError, OutputError, counted, first_line, listing
from alignment.config.options import AlignmentConfig
from alignment.config.options_export import ExportOptions
from alignment.engines.collectives import barrier
from alignment.internals.transformers_experts import converting_by_file
from alignment.models.adapters.folder import read_adapter, task_name
from alignment.models.adapters.merging import base_config, check_match, inject, load_base, merge, trained_dtype
from alignment.models.architectures import is_mixture
from alignment.models.loading import load_whole
from alignment.models.source import ModelSource, read_config
from alignment.models.tasks import CAUSAL_LM, CLASSIFIER, Task
from alignment.reporting.formats import in_order
from alignment.reporting.model_card import public
from alignment.reporting.run_view import read_object
from alignment.run.activity import ACTIVITY
from alignment.run.ranks import rank, tell

Tell = Callable[[str], None]


@dataclass(frozen=True)
class ExportReport:
    """Result of an export."""

    source: str  #: name of the folder
    base_model: str | None  #: folder or Hub name of the model that an adapter was merged into; None for a full model
    task: str  #: ``causal_lm`` or ``classifier``
    dtype: str  #: of the exported weights, by torch's name
    dequantized: bool  #: whether the base was quantized, so that its dequantized weights were merged
    masters: int  #: number of tensors that were taken from the fp32 master weights
    rows: int = 0  #: number of rows on which source and export were compared
    error_mean: float | None = None  #: mean absolute difference of their log-probs per token (or scores)
    error_max: float | None = None  #: the largest difference

    def lines(self) -> Iterator[str]:
        """The report as lines of text."""
        yield f"contains all weights in {self.dtype}" + ("" if self.base_model is None else "; the adapter is merged")
        if self.dequantized:
            yield "the base was quantized: the adapter is merged into its dequantized weights, not the original ones"
        if self.masters:
            yield f"{counted(self.masters, 'tensor')} of the fp32 master weights instead of those in the 16-bit files"
        if self.rows:
            what = "score" if self.task == "classifier" else "log-prob per token"
            yield (
                f"{what} on {counted(self.rows, 'row')}: the export differs from its source by {self.error_mean:.2g} "
                f"on average and {self.error_max:.2g} at most"
            )


# A model in the dtype of the export, its task and tokenizer, rows, the outputs of its source for them, and the report.
Loaded = tuple[PreTrainedModel, Task, Any, Rows, list[float], ExportReport]


def export(
    source: Path, out: Path, options: ExportOptions | None = None, tell: Tell = lambda line: None
) -> ExportReport:
    """Write the full model in ``source`` to ``out``, which does not exist or is empty. For a single process.

    ``source`` is a checkpoint, an output folder, or any other folder of a full model or an adapter. ``tell`` is called
    with a message for every step.

    Raises:
        AlignmentError: an option, the source or its base cannot be used, or ``out`` is not empty or cannot be written.
    """
    options = options or ExportOptions()
    check_output_folder(out, option="out")
    if not source.is_dir():
        beside = sorted((folder.name for folder in source.parent.glob("checkpoint-*")), key=in_order)
        raise ModelError(f"source: {source}: no such folder" + (f"; available: {listing(beside)}" if beside else ""))
    masters = checked_masters(source, wanted=options.dtype == "float32")
    load = _merged if _is_adapter(source) else _model
    with no_progress_bar():
        model, task, tokenizer, rows, before, report = load(source, masters, options, tell)
        broken = next((name for name, one in model.named_parameters() if not bool(torch.isfinite(one).all())), None)
        if broken is not None:
            raise ModelError(f"{source}: {broken} is not finite in {report.dtype}; use another dtype or source")
        with written_folder(out, tokenizer, key="out") as partial:
            tell(f"writing {out}")
            by_file = converting_by_file(model) if is_mixture(model.config) else contextlib.nullcontext()
            try:
                with by_file:
                    model.save_pretrained(partial, max_shard_size=options.max_shard_size)
            except (ValueError, RuntimeError) as error:  # such as an inconsistent generation configuration
                raise OutputError(f"{source}: the model cannot be written: {first_line(error)}") from error
            del model
            gc.collect()
            if rows:
                after = outputs(load_whole(str(partial), task, "auto", options.trust_remote_code), rows, task)
                errors = [abs(one - other) for one, other in zip(before, after, strict=True)]
                mean = sum(errors) / len(errors)
                report = replace(report, rows=len(rows), error_mean=mean, error_max=max(errors))
            published = json.dumps(public(asdict(report)), indent=2)  # without local folders
            (partial / REPORT).write_text(f"{published}\n", encoding="utf-8")
            title, lines = out.absolute().name, [*report.lines()]
            card = card_of(source, title, report.task == "classifier", report.base_model, lines)
            (partial / "README.md").write_text(card.text(), encoding="utf-8")
    return report


def _is_adapter(folder: Path) -> bool:
    """Whether ``folder`` is an adapter (True) or a full model (False)."""
    adapter = (folder / "adapter_config.json").is_file()
    model = (folder / "config.json").is_file() and any(folder.glob("model*.safetensors"))
    if adapter and model:
        raise ModelError(f"{folder} contains an adapter and a full model; move one of them to another folder")
    if adapter or model:
        return adapter
    inner = sorted({file.parent.name for file in folder.glob("[!.]*/*config.json")}, key=in_order)
    advice = f"pass one of those in it: {listing(inner)}" if inner else "pickles, as of DeepSpeed, are not read"
    raise ModelError(
        f"{folder} has neither a model (config.json, model.safetensors) nor an adapter (adapter_config.json); {advice}"
    )


def _model(source: Path, masters: Masters, options: ExportOptions, tell: Tell) -> Loaded:
    """Load a full model, with its master weights if the export is in fp32."""
    for name in ("base", "revision", "load_in_4bit", "load_in_8bit"):
        if getattr(options, name):
            raise OptionError(f"{name}: applies to the base of an adapter, but {source} is a full model; remove it")
    names = read_object(source / "config.json").get("architectures") or []
    task = CLASSIFIER if any("SequenceClassification" in name for name in names) else CAUSAL_LM
    trust, path = options.trust_remote_code, str(source.absolute())
    config = read_config(path, key="source", trust_remote_code=trust, task=task)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{source}: the weights are quantized; export the model before quantization")
    tokenizer = _tokenizer(path, None, trust)
    rows = sample_rows(options, tokenizer, config)
    tell(f"source: {source}, {task.noun}; exporting in dtype {options.dtype}")
    count = 0
    if options.dtype in ("auto", "float32"):
        model = load_whole(path, task, options.dtype, trust)
        count = put_masters(model, masters, source)
        before = outputs(model, rows, task)
    else:  # loaded twice instead of converted, because transformers keeps some modules in fp32
        before = outputs(load_whole(path, task, "auto", trust), rows, task)
        gc.collect()
        model = load_whole(path, task, options.dtype, trust)
    if options.dtype == "float32" and config.dtype in (torch.bfloat16, torch.float16) and not count:
        tell("the folder has no fp32 master weights, so float32 has no advantage over its 16-bit weights")
    name, precision = source.absolute().name, str(model.dtype).removeprefix("torch.")
    return model, task, tokenizer, rows, before, ExportReport(name, None, task_name(task), precision, False, count)


def _merged(source: Path, masters: Masters, options: ExportOptions, tell: Tell) -> Loaded:
    """Load the base model of an adapter and merge the adapter into it, tensor by tensor in fp32."""
    trust = options.trust_remote_code
    adapter = read_adapter(source, options.base, options.revision)
    if (given := options.quantization) is not None:
        recorded = {name: value for name, value in (adapter.quantization or {}).items() if name == "experts"}
        adapter = replace(adapter, quantization={**given, **recorded})
    config = base_config(adapter, trust)
    quantized = (adapter.quantization or getattr(config, "quantization_config", None)) is not None
    own = (source / "tokenizer_config.json").is_file()
    where, revision = (str(source), None) if own else (adapter.base, adapter.revision)
    tokenizer = _tokenizer(where, revision, trust)
    check_match(adapter, config, trust)
    dtype = getattr(torch, options.dtype, None) or trained_dtype(adapter) or config.dtype or torch.bfloat16
    rows = sample_rows(options, tokenizer, config)
    precision = str(dtype).removeprefix("torch.")
    tell(f"base: {adapter.base}, {adapter.task.noun}; exporting in {precision}")
    model, kept = load_base(adapter, config, dtype, trust)
    injected = inject(model, adapter)
    count = put_masters(model, masters, source)
    before = outputs(model, rows, adapter.task)
    report = ExportReport(source.absolute().name, adapter.base, task_name(adapter.task), precision, quantized, count)
    return merge(injected, dtype, kept), adapter.task, tokenizer, rows, before, report


def _tokenizer(where: str, revision: str | None, trust_remote_code: bool) -> Any:
    """Load the tokenizer of a folder or Hub name; return None if it has none."""
    try:
        return AutoTokenizer.from_pretrained(where, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # each library has its own error classes for a broken file
        if (Path(where) / "tokenizer_config.json").is_file():
            raise ModelError(f"{where}: the tokenizer cannot be loaded: {first_line(error)}") from error
        return None


def write_merged(args: AlignmentConfig, source: ModelSource) -> None:
    """Merge the adapters in ``output_dir`` into their base model ``source`` as stored on disk; collective.

    A merged model of an earlier attempt is moved aside. If they cannot be merged, the adapters are not affected.
    """
    if rank() == 0:
        adapters, folder = Path(args.output_dir or ""), Path(args.merged_output_dir or "")
        stays = not args.resume_from_checkpoint or not folder.is_dir() or not any(folder.iterdir())
        if (aside := set_aside(folder.absolute().parent, [] if stays else [folder])) is not None:
            tell(f"merged_output_dir: moved the merged model of an earlier attempt to {aside}")
        revision = source.init_kwargs.get("revision")
        options = ExportOptions(base=source.path, revision=revision, trust_remote_code=args.trust_remote_code)
        try:
            with ACTIVITY("merge"):
                report = export(adapters, folder, options)
        except AlignmentError as error:
            advice = f"the adapters are saved in {adapters}; merge them with deepspeed-alignment export"
            raise type(error)(f"merged_output_dir: {error}; {advice}") from error
        for line in report.lines():
            tell(line)
    barrier()
