"""The ``vllm-serve`` command: the vLLM server that generates for the policy of a recipe."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

from alignment.cli.guarded import guarded
from alignment.cli.parsing import Parser, glimpse
from alignment.cli.train import read_options
from alignment.config.dtypes import Machine, planning_for
from alignment.config.errors import OptionError, refuse
from alignment.config.options_online import OnlineOptions
from alignment.engines.start_up import uncollected

_ABOUT = """\
Print the command that starts the vLLM server for the policy of a recipe, on GPUs unless use_cpu is set. Takes the
options of `train` and:

  --run  start the server instead
"""
_DEVICE = "DS_ACCELERATOR"


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment vllm-serve") -> None:
    """Print the command, or become the server, and exit with status 0, or 1 after an error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    sys.exit(guarded(lambda: _run(arguments, program), use_cpu=True))


def _run(arguments: list[str], program: str) -> None:
    parser = Parser(prog=program, add_help=False, allow_abbrev=False)
    parser.add_argument("--run", action="store_true")
    given, arguments = parser.parse_known_args(arguments)
    if any(argument in ("-h", "--help") for argument in arguments):
        print(_ABOUT, flush=True)
    on_cpu = glimpse(arguments).use_cpu or os.environ.get(_DEVICE, "").lower() == "cpu"
    os.environ[_DEVICE] = "cpu"  # do not use a GPU of this machine
    with planning_for(Machine(1, cuda=not on_cpu, reads_weights=False)), uncollected():
        options = read_options(arguments, program, use_cpu=True, data=False)
        if not isinstance(options, OnlineOptions) or options.rollout_backend != "vllm":
            raise OptionError("rollout_backend: the run does not generate with vLLM; set rollout_backend: vllm")
        from alignment.rollout.vllm.command import server_environment, server_variables

        command = _command(options)
        if given.run:
            os.execvpe(command[0], command, server_environment(options))
        words = [f"{name}={value}" for name, value in server_variables(options).items()]
    print(shlex.join(words + command).replace(" --", " \\\n  --"), flush=True)


def _command(options: OnlineOptions) -> list[str]:
    """Return the command line of the server, unless vLLM cannot generate for this run."""
    from alignment.planning.engines import plan_engines
    from alignment.rollout.vllm.command import LOCAL, serve_command
    from alignment.rollout.vllm.rollout import VLLMRollout
    from alignment.training.arguments import model_sources

    if options.vllm_mode == "colocate":
        refuse(options, "vllm_mode", "the run starts its own servers; set vllm_mode: server to start one")
    address = urlsplit(options.vllm_url)
    if address.scheme != "http":
        refuse(options, "vllm_server_base_url", "this command starts a server without TLS; set http://HOST:PORT")
    host = LOCAL if address.hostname == "localhost" else str(address.hostname)
    if host != LOCAL and options.vllm_weights_folder is None:
        raise OptionError(f"vllm_weights_folder: set it to a folder that the run shares with the server on {host}")
    plan = plan_engines(options, *model_sources(options.model_name_or_path, None, options, True))
    of_policy = plan.source, plan.adapters, plan.dtypes.compute
    VLLMRollout(options, *of_policy)  # raises if vLLM cannot generate for it
    return serve_command(options, *of_policy, host=host, port=address.port or 80)
