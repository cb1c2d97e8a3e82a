"""The ``plan`` command: the memory of a run by phase and part, calculated from its configuration alone."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence

from alignment.cli.guarded import guarded
from alignment.cli.parsing import Parser, gigabytes
from alignment.cli.train import read_options
from alignment.config.dtypes import Machine, planning_for
from alignment.config.errors import ModelError, OptionError, setting
from alignment.config.options import AlignmentConfig
from alignment.config.registry import METHODS
from alignment.engines.start_up import old_objects_spared, uncollected
from alignment.planning.gpu_terms import usable_bytes
from alignment.run.ranks import world_size

_MOST = 10_000_000
_ABOUT = """\
Calculate the memory that a run needs on each GPU and on each host, by phase and part, from its configuration alone: no
GPU is needed, and neither weights nor data are read. Takes the options of `train` and:

  --gpu_memory GB     memory of each GPU, as it is sold: 24 [24]
  --host_memory GB    memory of each host; unlimited by default
  --gpus N            number of GPUs of each host [1]
  --nodes N           number of hosts [1]
  --tokens N          tokens of the longest sequence; what the options allow by default
  --attention KERNEL  flash, efficient or math [flash]
  --json              print the plan as JSON, in bytes
"""


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment plan") -> None:
    """Print the plan, and exit with status 0, whether or not it fits, or 1 after an error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    sys.exit(guarded(lambda: _run(arguments, program), use_cpu=True))


def plan_parser(program: str) -> Parser:
    """Return a parser of the options that ``train`` does not have."""
    parser = Parser(prog=program, add_help=False, allow_abbrev=False)
    parser.add_argument("--gpu_memory", type=gigabytes, default=24.0)
    parser.add_argument("--host_memory", type=gigabytes, default=math.inf)
    for name in ("--gpus", "--nodes"):
        parser.add_argument(name, type=_number, default=1)
    parser.add_argument("--tokens", type=_number)
    parser.add_argument("--attention", choices=("flash", "efficient", "math"), default="flash")
    parser.add_argument("--json", action="store_true")
    return parser


def _number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to {_MOST}, found {text}")
    return int(text)


def _run(arguments: list[str], program: str) -> None:
    if world_size() > 1:
        raise OptionError(f"{program} must run in a single process; start it without a launcher, and pass --gpus")
    given, arguments = plan_parser(program).parse_known_args(arguments)
    if any(argument in ("-h", "--help") for argument in arguments):
        print(_ABOUT, flush=True)
    os.environ["DS_ACCELERATOR"] = "cpu"  # do not use a GPU of this machine
    card = usable_bytes(given.gpu_memory)
    with planning_for(Machine(given.gpus * given.nodes, cuda=True, reads_weights=False, card=card)):
        with uncollected():
            options = read_options(arguments, program, use_cpu=True, data=False)
        if options.use_cpu:
            raise OptionError(f"{setting('use_cpu', True)}: plan calculates the memory of GPUs; remove it")
        with old_objects_spared():
            _print(options, given, card)


def _print(options: AlignmentConfig, given: argparse.Namespace, card: float) -> None:
    from alignment.models.source import check_positions
    from alignment.planning.plan import NotPlanned
    from alignment.planning.table import GB, as_json
    from alignment.training.arguments import model_sources
    from alignment.training.memory_plan import RunPlan

    method = METHODS.trainer(options).method_class(options)
    model = options.model_name_or_path
    policy, reference = model_sources(model, None, options, method.needs_reference, method.task)
    check_positions(policy.config, given.tokens, "--tokens")
    run = RunPlan(
        options,
        method,
        policy,
        reference if method.needs_reference else None,
        card=card,
        memory=given.host_memory * GB,
        ranks=given.gpus * given.nodes,
        hosts=given.nodes,
        tokens=given.tokens,
        kernel=given.attention,
    )
    try:
        run = run.settled()
        if given.json:
            changes = [] if run.fits else run.sufficient_changes
            further = {"longest": run.longest, "changes": [dict(change.options) for change in changes]}
            text = json.dumps(as_json(run.plan, run.card, run.memory) | further, indent=2)
        else:
            text = "\n".join(run.lines())
    except NotPlanned as error:
        raise ModelError(f"model_name_or_path: {error}; its memory cannot be planned") from error
    print(text)
