"""The command ``export``: write a checkpoint, a model or an adapter with its base as a full Hugging Face folder."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from alignment.cli.output import leave_with_help, surviving_closed_output
from alignment.config.errors import OptionError, setting
from alignment.engines.guard import guarded
from alignment.engines.launch_env import hush_libraries
from alignment.reporting.activity import ACTIVITY, Limits

_ABOUT = """\
Write a checkpoint, a trained model, or a PEFT adapter merged into its base, as a full Hugging Face folder: safetensors
in the dtype asked for, tokenizer, generation config and a model card. One tensor at a time, on the host; no GPU is
needed. The files of a checkpoint are compared with its manifest. An export in fp32 takes the fp32 master weights of a
checkpoint where it has them; an adapter is merged in fp32. The folder is read again, and the log-probs (of a reward
model the scores) of sample rows are compared with those of SOURCE; export_report.json in OUT has the result."""


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment export") -> None:
    """Export and exit with the code: 0, 1 after an error, 2 after wrong usage, 130 after Ctrl-C.

    Args:
        argv: arguments without the program's name; those of this process when None.
        program: what usage lines call this command.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(program)
    leave_with_help(parser, arguments)
    options = parser.parse_args(arguments)
    with surviving_closed_output():
        code = 1
        ranks = os.environ.get("WORLD_SIZE", "1")
        if ranks != "1":
            print(f"error: {program}: runs in one process, and WORLD_SIZE is {ranks[:40]}", file=sys.stderr)
        else:
            code = guarded(lambda: _run(options))
    sys.exit(code)


def _run(options: argparse.Namespace) -> None:
    for name, value in vars(options).items():
        if isinstance(value, str) and "\0" in value:
            raise OptionError(f"{setting(name, value)}: it has a NUL character in it; remove that")
    if (options.load_in_4bit or options.load_in_8bit) and find_spec("bitsandbytes") is None:
        raise OptionError(
            f"--load_in_{4 if options.load_in_4bit else 8}bit: bitsandbytes is not installed; pip install bitsandbytes"
        )
    hush_libraries()
    # Reading, merging and writing a large model takes hours on a slow disk, and nobody waits for this process.
    ACTIVITY.limits = Limits(least=math.inf, first=math.inf)
    from alignment.engines.exporting.export import export

    report = export(
        Path(options.source).expanduser(),
        Path(options.out).expanduser(),
        dtype=options.dtype,
        base=options.base,
        revision=options.revision,
        quantization=_quantization(options),
        samples=options.dataset_name,
        sample_count=options.samples,
        max_shard_size=options.max_shard_size,
        trust_remote_code=options.trust_remote_code,
        tell=lambda line: print(line, flush=True),
    )
    print(
        "\n".join([*report.lines(), f"model, tokenizer, README.md and export_report.json: {options.out}"]), flush=True
    )


def _quantization(options: argparse.Namespace) -> dict[str, Any] | None:
    """What the options say about the weights that the adapter was trained on, as transformers' dictionary."""
    if options.load_in_4bit:
        return {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": options.bnb_4bit_quant_type,
            "bnb_4bit_use_double_quant": options.use_bnb_nested_quant == "true",
        }
    return {"load_in_8bit": True} if options.load_in_8bit else None


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=_ABOUT, allow_abbrev=False)
    add = parser.add_argument
    add(
        "source", metavar="SOURCE",
        help="checkpoint-N, an output folder, or any folder of a full model (config.json, model.safetensors) or of an "
        "adapter (adapter_config.json, adapter_model.safetensors)",
    )  # fmt: skip
    add("out", metavar="OUT", help="folder to write; it must not exist, or be empty")
    add(
        "--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"),
        help="of the exported weights; auto: that of a full model as it is, that of an adapter's training where it is "
        "recorded, else that of its base [%(default)s]",
    )  # fmt: skip
    add(
        "--base", metavar="MODEL",
        help="folder or hub name of the base model: of an adapter, if not the one that it names; of a full model, "
        "the one before training, to measure what training changed (default: that of the run's options, if a folder)",
    )  # fmt: skip
    add("--revision", help="revision of the base model on the hub")
    bits = parser.add_mutually_exclusive_group()
    bits.add_argument(
        "--load_in_4bit", action="store_true",
        help="the adapter was trained on 4-bit weights: merge into them, dequantised (adapters trained here say so "
        "themselves)",
    )  # fmt: skip
    bits.add_argument("--load_in_8bit", action="store_true", help="the same for 8-bit weights")
    add(
        "--bnb_4bit_quant_type",
        default="nf4",
        choices=("nf4", "fp4"),
        help="format of the 4-bit weights [%(default)s]",
    )
    add(
        "--use_bnb_nested_quant", default="true", choices=("true", "false"),
        help="whether their quantisation constants were quantised as well [%(default)s]",
    )  # fmt: skip
    add("--dataset_name", metavar="DATA", help="file, folder or hub name of rows to compare on; else built-in texts")
    add("--samples", type=int, default=8, metavar="N", help="rows to compare on; 0: do not compare [%(default)s]")
    add("--max_shard_size", default="5GB", metavar="SIZE", help="largest size of a weight file [%(default)s]")
    add("--trust_remote_code", action="store_true", help="run Python code that comes with a model or tokenizer")
    return parser


if __name__ == "__main__":
    main()
