"""The ``chat`` command: a conversation with a trained model in the terminal, or answers to the lines of a pipe."""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from alignment.cli.guarded import guarded
from alignment.cli.output import parse_in_one_process
from alignment.config.fields import checked_text, option_fields, validated, words
from alignment.config.options_online import OnlineOptions
from alignment.config.options_training import FaultOptions
from alignment.run.activity import ACTIVITY

_ABOUT = """\
Chat with a trained model. Answers are printed as they are generated, with the chat template, the stop tokens and the
adapter of the model; the base of an adapter is quantized as in training. Sampling options that are not set have the
values of the model's generation_config.json; --temperature 0 always takes the most likely token. Ctrl-C stops an
answer; Ctrl-D or /quit ends the command. If stdin is not a terminal, each line is answered, and only answers are
written to stdout."""
_CHECKED = words("max_new_tokens temperature top_p top_k min_p repetition_penalty seed")  # by OnlineOptions
_DEFAULTS = {"max_new_tokens": 512, "seed": 42}


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment chat") -> None:
    """Chat, then exit with status 0, 1 after an error, 2 after a usage error, or 130 after Ctrl-C while loading."""
    given = parse_in_one_process(_parser(program), argv)
    sys.exit(guarded(lambda: _run(given)))


def _parser(program: str) -> ArgumentParser:
    parser = ArgumentParser(prog=program, description=_ABOUT, allow_abbrev=False)
    what = "output folder of a run, a checkpoint, any other folder with a model or an adapter, or a Hub name"
    parser.add_argument("run", metavar="RUN", help=what)
    also = "answer with this model as well; without a value, with the model that the run started from"
    parser.add_argument("--compare", metavar="MODEL", nargs="?", const="", help=also)
    parser.add_argument("--system", metavar="TEXT", help="system message that every conversation starts with")
    for option in option_fields(OnlineOptions):
        if option.name in _CHECKED:
            default, text = _DEFAULTS.get(option.name), option.metadata["help"].removesuffix(" Unset: all tokens.")
            text = f"{text} [{default or 'that of the model'}]"
            parser.add_argument(f"--{option.name}", metavar="VALUE", default=default, help=text)
    plain = "false: take each line as the prompt itself, for a model that was trained on prompts that are strings"
    parser.add_argument("--apply_chat_template", choices=("true", "false"), default="true", help=plain)
    base = "folder or Hub name of an adapter's base model, instead of the one it names"
    parser.add_argument("--base", metavar="MODEL", help=base)
    parser.add_argument("--revision", help="revision on the Hub, of a full model or of an adapter's base model")
    parser.add_argument("--use_cpu", action="store_true", help="compute on the CPU even if there is a GPU")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with a model")
    return parser


def _run(given: Namespace) -> None:
    for name, value in vars(given).items():
        checked_text(name, value if isinstance(value, str) else "")
    checked = {name: value for name in _CHECKED if (value := getattr(given, name)) is not None}
    if checked.get("temperature") in ("0", "0.0"):  # greedy
        checked |= {"temperature": 1.0, "top_k": 1}
    given.sampling = validated(OnlineOptions, checked)
    ACTIVITY.limits = FaultOptions(hang_timeout=math.inf, hang_timeout_first=math.inf)  # a user may think for hours
    from alignment.cli.chat_session import converse, load_speakers

    seed, with_terminal = given.sampling.pop("seed"), sys.stdin.isatty() and sys.stdout.isatty()
    converse(load_speakers(given), seed, with_terminal)
