"""The ``sample`` command: write a model's completions for prompts as rows that methods train on."""

from __future__ import annotations

import sys
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from alignment.cli.guarded import guarded
from alignment.cli.help import default_text
from alignment.cli.output import parse_arguments
from alignment.cli.parsing import without_local_rank
from alignment.config.fields import option_fields
from alignment.engines.launch_env import init_distributed
from alignment.engines.start_up import import_libraries
from alignment.methods.online_dpo_options import SampleConfig

_ABOUT = """\
Sample completions of a trained model for prompts, score them if a reward function, a reward model or a judge is given,
and write them as rows that methods train on. Can be started with a launcher as `train` is. The rows do not depend on
the number of ranks. An interrupted command continues when it is repeated."""
_RUN = "output folder of a run, a checkpoint, any folder with a model or an adapter, or a Hub name"
_SHORT = {"num_generations": ["-n"], "rows": ["--as"]}


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment sample") -> None:
    """Sample, then exit with status 0, 1 after an error, 2 after a usage error, 85 or 130 if it was stopped."""
    run_sampling(_parser(program), argv, "write_rows")


def _parser(program: str) -> ArgumentParser:
    return sampling_parser(program, _ABOUT, (*SampleConfig.OF_ROWS, *SampleConfig.ACCEPTED), nargs=1, help=_RUN)


def sampling_parser(program: str, about: str, accepted: Sequence[str], **runs: Any) -> ArgumentParser:
    """Return a parser of models and options; the values are lists of texts, which :class:`SampleConfig` converts."""
    usage = f"{program} RUN --prompts DATA [--OPTION VALUE ...]"
    parser = ArgumentParser(program, usage, about, argument_default=SUPPRESS, allow_abbrev=False)
    parser.add_argument("runs", metavar="RUN", **runs)
    prompts = "dataset of prompts: file, folder or Hub name"
    parser.add_argument("--prompts", dest="dataset_name", metavar="DATA", nargs=1, required=True, help=prompts)
    fields = {field.name: field for field in option_fields(SampleConfig)}
    for name in accepted:
        text = f"{fields[name].metadata['help'].replace('`', '')} [{default_text(fields[name])}]".replace("%", "%%")
        parser.add_argument(f"--{name}", *_SHORT.get(name, ()), nargs="*", metavar="VALUE", help=text)
    return parser


def run_sampling(parser: ArgumentParser, argv: Sequence[str] | None, work: str) -> None:
    """Parse the arguments, join the process group, call the function ``work`` of ``sampling.py``, and exit.

    The large libraries are imported last, so that an invalid option fails immediately.
    """
    found = vars(parse_arguments(parser, without_local_rank(sys.argv[1:] if argv is None else argv)))
    runs = found.pop("runs")
    given = {name: values if len(values) > 1 else (values or [True])[0] for name, values in found.items()}

    def job() -> None:
        options = SampleConfig(save_strategy="no", **given)
        init_distributed(options.use_cpu)
        import_libraries()
        getattr(import_module("alignment.cli.sampling"), work)(options, runs)

    sys.exit(guarded(job, str(given.get("use_cpu")).lower() in ("true", "1", "yes", "on")))
