"""The ``export`` command: write a checkpoint, a model or an adapter merged into its base as a full model folder."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from alignment.cli.guarded import guarded
from alignment.cli.output import leave_with_help, surviving_closed_output
from alignment.config.errors import OptionError, setting
from alignment.engines.launch_env import hush_libraries
from alignment.run.activity import ACTIVITY, Limits

_ABOUT = """\
Export a checkpoint, a trained model, or a PEFT adapter merged into its base model as a Hugging Face model folder:
safetensors in the requested dtype, tokenizer, generation config and a model card. Tensors are processed one at a time
in host memory; no GPU is needed. The files of a checkpoint are verified against its manifest. An fp32 export uses the
fp32 master weights of a checkpoint if it has them; adapters are merged in fp32. The exported model is loaded again,
and its log-probs on sample rows (scores for a reward model) are compared with those of SOURCE; the result is written
to export_report.json in OUT."""


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment export") -> None:
    """Export, then exit with status 0, 1 after an error, 2 after a usage error, or 130 after Ctrl-C.

    Args:
        argv: arguments without the program name. Defaults to those of this process.
        program: program name in usage lines.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(program)
    leave_with_help(parser, arguments)
    options = parser.parse_args(arguments)
    with surviving_closed_output():
        code = 1
        ranks = os.environ.get("WORLD_SIZE", "1")
        if ranks != "1":
            print(
                f"error: {program} must run in a single process, but WORLD_SIZE is {ranks[:40]}; "
                "start it without a launcher",
                file=sys.stderr,
            )
        else:
            code = guarded(lambda: _run(options))
    sys.exit(code)


def _run(options: argparse.Namespace) -> None:
    for name, value in vars(options).items():
        if isinstance(value, str) and "\0" in value:
            raise OptionError(f"{setting(name, value)}: contains a NUL character; remove it")
    if (options.load_in_4bit or options.load_in_8bit) and find_spec("bitsandbytes") is None:
        raise OptionError(
            f"--load_in_{4 if options.load_in_4bit else 8}bit requires bitsandbytes; run pip install bitsandbytes"
        )
    hush_libraries()
    # Exporting a large model takes hours on a slow disk, and no other rank waits for this process: never time out.
    ACTIVITY.limits = Limits(least=math.inf, first=math.inf)
    from alignment.checkpoint.exporting.export import export

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
    """Return the quantization of the base weights that the adapter was trained on, as transformers' dictionary."""
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
        help="checkpoint-N, an output folder, or any folder with a full model (config.json, model.safetensors) or an "
        "adapter (adapter_config.json, adapter_model.safetensors)",
    )  # fmt: skip
    add("out", metavar="OUT", help="output folder; must be empty or not exist")
    add(
        "--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"),
        help="dtype of the exported weights; auto: the dtype of a full model; for an adapter, the dtype that it was "
        "trained in if recorded, otherwise that of its base model [%(default)s]",
    )  # fmt: skip
    add(
        "--base", metavar="MODEL",
        help="folder or Hub name of the base model. For an adapter, overrides the base model that its config names. "
        "For a full model, the model before training, used to measure how much training changed the weights "
        "(default: the model of the run's options, if it is a local folder)",
    )  # fmt: skip
    add("--revision", help="revision of the base model on the Hub")
    bits = parser.add_mutually_exclusive_group()
    bits.add_argument(
        "--load_in_4bit", action="store_true",
        help="merge the adapter into dequantized 4-bit base weights, if it was trained on those (detected "
        "automatically for adapters trained with this package)",
    )  # fmt: skip
    bits.add_argument("--load_in_8bit", action="store_true", help="the same for 8-bit base weights")
    add(
        "--bnb_4bit_quant_type",
        default="nf4",
        choices=("nf4", "fp4"),
        help="quantization type of the 4-bit weights [%(default)s]",
    )
    add(
        "--use_bnb_nested_quant", default="true", choices=("true", "false"),
        help="whether nested quantization was used for the 4-bit weights [%(default)s]",
    )  # fmt: skip
    add("--dataset_name", metavar="DATA", help="file, folder or Hub name of the rows to compare on [built-in texts]")
    add("--samples", type=int, default=8, metavar="N", help="number of rows to compare on; 0 to skip [%(default)s]")
    add("--max_shard_size", default="5GB", metavar="SIZE", help="maximum size of a weight file [%(default)s]")
    add("--trust_remote_code", action="store_true", help="allow models and tokenizers to run their own Python code")
    return parser


if __name__ == "__main__":
    main()
