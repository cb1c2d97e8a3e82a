"""The ``vllm-serve`` command: the vLLM server that generates for the policy of a recipe."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from alignment.cli.guarded import guarded
from alignment.cli.parsing import Parser, glimpse
from alignment.cli.train import read_options
from alignment.config.dtypes import Machine, planning_for
from alignment.config.errors import OptionError, refuse, setting
from alignment.config.options_online import OnlineOptions
from alignment.engines.start_up import old_objects_spared, uncollected
from alignment.run.ranks import world_size

_ABOUT = """\
Print the command that starts the vLLM server for the policy of a recipe, for GPUs unless use_cpu is set. Takes the
options of `train` and:

  --run  start the server instead of printing its command
"""
_DEVICE = "DS_ACCELERATOR"


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment vllm-serve") -> None:
    """Print the command, or become the server, and exit with status 0, or 1 after an error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    sys.exit(guarded(lambda: _run(arguments, program), use_cpu=True))


def _run(arguments: list[str], program: str) -> None:
    if world_size() > 1:
        raise OptionError(f"{program} must run in a single process; start it without a launcher")
    parser = Parser(prog=program, add_help=False, allow_abbrev=False)
    parser.add_argument("--run", action="store_true")
    given, arguments = parser.parse_known_args(arguments)
    if any(argument in ("-h", "--help") for argument in arguments):
        print(_ABOUT, flush=True)
    on_cpu = glimpse(arguments).use_cpu or os.environ.get(_DEVICE, "").lower() == "cpu"
    os.environ[_DEVICE] = "cpu"  # do not use a GPU of this machine
    with planning_for(Machine(1, cuda=not on_cpu, reads_weights=False)):
        with uncollected():
            options = read_options(arguments, program, use_cpu=True, data=False)
        with old_objects_spared():
            command, variables, environment = _server(options)
    if given.run:
        os.execvpe(command[0], command, environment)
    words = [f"{name}={value}" for name, value in variables.items()]
    print(shlex.join(words + command).replace(" --", " \\\n  --"), flush=True)


def _server(options: object) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Return the command line of the server, the variables that it needs, and its whole environment."""
    from alignment.planning.engines import plan_engines
    from alignment.rollout.vllm.command import LOCAL, listening, serve_command, server_environment, server_variables
    from alignment.training.arguments import model_sources

    if not isinstance(options, OnlineOptions) or options.rollout_backend != "vllm":
        raise OptionError("rollout_backend: the run does not generate with vLLM; set rollout_backend: vllm")
    if options.vllm_mode == "colocate":
        refuse(options, "vllm_mode", "the run starts its own servers; set vllm_mode: server to start one")
    host, port = listening(options)
    if host != LOCAL and options.vllm_weights_folder is None:
        where = setting("vllm_server_base_url", options.vllm_url)
        raise OptionError(f"vllm_weights_folder: a server on another host ({where}) needs a shared folder; set it")
    policy, reference = model_sources(options.model_name_or_path, None, options, True)
    plan = plan_engines(options, policy, reference)
    words = serve_command(options, plan.source, plan.adapters, plan.dtypes.compute, host=host, port=port)
    return words, server_variables(options), server_environment(options)
