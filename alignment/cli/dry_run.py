"""The dry run: options, DeepSpeed JSON, rows, lengths and advice, printed before any weights are loaded."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from alignment.checkpoint.resume import choose
from alignment.config.errors import counted
from alignment.config.fields import option_fields
from alignment.run.ranks import tell
from alignment.training.run_manifest import PERCENTILES, shown_name, token_lengths

if TYPE_CHECKING:
    from alignment.config.options import AlignmentConfig
    from alignment.training.data import PreparedData
    from alignment.training.trainer import AlignmentTrainer


_ENGINES = {"deepspeed.json": "policy", "ref_deepspeed.json": "reference", "reward_deepspeed.json": "reward model"}
_WIDTH = 120  # of the default options
_EXAMPLES = 3
_LONGEST = 600  # characters shown of a text, half of them from each end


def print_dry_run(trainer: AlignmentTrainer) -> None:
    """Print the dry run on rank 0. Collective. Raises what a run would raise about the checkpoint to resume from."""
    args = trainer.args
    if asked := args.resume_from_checkpoint:
        found = choose(trainer.output_dir, asked, trainer.manifest(), anyway=args.resume_anyway)
        tell(f"resume_from_checkpoint: {found.folder if found else 'no checkpoint; the run would be a new one'}\n")
    stored = [] if trainer.engines.stores is None else trainer.engines.stores.lines()
    if trainer.is_world_process_zero():
        print("\n".join(dry_run_lines(trainer, [*stored, *trainer.resources.looked_at()])), flush=True)


def dry_run_lines(trainer: AlignmentTrainer, stored: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of the dry run; those about log-prob stores and external resources follow the plan."""
    plan, sampler, train = trainer.planned.engines, trainer.data.sampler, trainer.data.train
    yield from _options(trainer.args)
    settings = trainer.settings()
    for name, owner in _ENGINES.items():
        if name in settings:
            yield from ("", f"DeepSpeed JSON of the {owner}:", json.dumps(settings[name], indent=2))
    yield from ("", plan.describe(), *stored)
    if (memory := trainer.context.memory_plan) is not None:
        yield from ("", *memory.lines())
    for data in (train, *trainer.data.eval.values()):
        if data is not None:
            lengths = token_lengths(data, trainer.method.completions)
            rows = [(name, list(values.values())) for name, values in lengths.items()]
            yield from ("", f"Data: {data.where}", *_counts(data), "", *_table("tokens", list(PERCENTILES), rows), "")
            yield from _examples(data, trainer)
    if sampler is not None and train is not None:
        yield from ("", f"Steps per epoch: {sampler.steps_per_epoch}, rows per step: {sampler.window}")
        yield from ("", "Advice:" if trainer.data.advice else "Advice: none")
        yield from (f"  - {line}" for line in trainer.data.advice)


def _options(options: AlignmentConfig) -> Iterator[str]:
    defaults = {field.name: field.default for field in option_fields(options)}
    values = options.to_dict()
    changed = {name: value for name, value in values.items() if name == "method" or value != defaults[name]}
    width = max(map(len, changed))
    yield "Options:"
    yield from (f"  {name.ljust(width)}  {json.dumps(value, default=str)}" for name, value in changed.items())
    unchanged = (f"{name}={json.dumps(value, default=str)}" for name, value in values.items() if name not in changed)
    yield "Options with their default values:"
    lines = textwrap.wrap(", ".join(unchanged), _WIDTH - 2, break_on_hyphens=False)
    yield from (f"  {line}" for line in lines)


def _counts(data: PreparedData) -> Iterator[str]:
    reports = [("rows", data.report)]
    if len(data.parts) > 1:
        reports += [(part.where, part.report) for part in data.parts]
    labels = ["desirable", "undesirable"] if data.report.desirable + data.report.undesirable else []
    rows = []
    for name, report in reports:
        counts = [report.rows_in, report.rows_out, sum(report.dropped.values())]
        counts += [getattr(report, label) for label in labels]
        rows.append((name, [*counts, report.prompts_cut, report.completions_cut]))
    yield from _table("", ["read", "kept", "dropped", *labels, "prompts truncated", "completions truncated"], rows)
    for reason, count in sorted(data.report.dropped.items(), key=lambda item: (-item[1], item[0])):
        yield f"  dropped {count:>8}  {reason}"


def _examples(data: PreparedData, trainer: AlignmentTrainer) -> Iterator[str]:
    names = ("prompt_ids", *trainer.method.completions)
    width = max(len(shown_name(name)) for name in names)
    for number in range(min(_EXAMPLES, len(data.dataset))):
        row = data.dataset[number]
        label = "" if "label" not in row else ", desirable" if row["label"] else ", undesirable"
        label += f", margin {row['margin']:g}" if row.get("margin") else ""
        source = data.source_row(number)
        yield f"  {source if isinstance(source, str) else f'row {source}'}{label}"
        for name in names:
            text = trainer.processing_class.decode(row[name], clean_up_tokenization_spaces=False)
            yield f"    {shown_name(name).ljust(width)}  {_shortened(text)!r}"


def _table(corner: str, columns: list[str], rows: list[tuple[str, list[Any]]]) -> Iterator[str]:
    """Yield the lines of a table: names on the left, integers under their columns."""
    left = max(map(len, [corner, *(name for name, _ in rows)]))
    widths = [max(len(column), 7) for column in columns]
    yield "  " + "  ".join([corner.ljust(left), *(c.rjust(w) for c, w in zip(columns, widths))]).rstrip()
    for name, values in rows:
        yield "  " + "  ".join([name.ljust(left), *(f"{v:.0f}".rjust(w) for v, w in zip(values, widths))])


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]} … {counted(len(text) - 2 * half, 'character')} omitted … {text[-half:]}"
