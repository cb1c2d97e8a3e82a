"""The ``export`` command: write a checkpoint, a model or an adapter merged into its base as a full model folder."""

from __future__ import annotations

import functools
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from alignment.cli.guarded import run_alone
from alignment.config.fields import checked_text, choices_of, hints
from alignment.config.options_export import ExportOptions

_ABOUT = """\
Export a checkpoint, a trained model, or a PEFT adapter merged into its base model as a Hugging Face model folder:
safetensors in the requested dtype, tokenizer, generation config and a model card. Tensors are processed one at a time
in host memory; no GPU is needed. The files of a checkpoint are verified against its manifest. An fp32 export uses the
fp32 master weights of a checkpoint if it has them; adapters are merged in fp32. The exported model is loaded again,
and its log-probs on sample rows (scores for a reward model) are compared with those of SOURCE; the result is written
to export_report.json in OUT."""


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment export") -> None:
    """Export, then exit with status 0, 1 after an error, 2 after a usage error, or 130 after Ctrl-C."""
    run_alone(lambda given: _run(**vars(given)), _parser(program), argv)


def _run(source: str, out: str, **given: Any) -> None:
    source, out = (checked_text(name, value) for name, value in (("source", source), ("out", out)))
    from alignment.checkpoint.export import export

    tell = functools.partial(print, flush=True)
    report = export(Path(source).expanduser(), Path(out).expanduser(), ExportOptions(**given), tell)
    tell("\n".join([*report.lines(), f"model, tokenizer, README.md and export_report.json: {out}"]))


def _parser(program: str) -> ArgumentParser:
    parser = ArgumentParser(prog=program, description=_ABOUT, allow_abbrev=False)
    parser.add_argument(
        "source", metavar="SOURCE",
        help="checkpoint-N, an output folder, or any folder with a full model (config.json, model.safetensors) or an "
        "adapter (adapter_config.json, adapter_model.safetensors)",
    )  # fmt: skip
    parser.add_argument("out", metavar="OUT", help="output folder; must be empty or not exist")
    bits = parser.add_mutually_exclusive_group()
    for field in fields(ExportOptions):
        name, default, text = f"--{field.name}", field.default, field.metadata["help"]
        if default is False:
            group = bits if field.name.startswith("load_in_") else parser
            group.add_argument(name, action="store_true", help=text)
            continue
        choices = ("true", "false") if default is True else choices_of(hints(ExportOptions)[field.name]) or None
        shown = "" if default is None else f" [{str(default).lower() if default is True else default}]"
        kind = int if type(default) is int else str
        parser.add_argument(name, type=kind, default=default, choices=choices, help=text + shown)
    return parser
