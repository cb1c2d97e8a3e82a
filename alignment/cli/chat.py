"""The ``chat`` command: a conversation with a trained model in the terminal, or answers to the lines of a pipe."""

from __future__ import annotations

import math
import os
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import fields

from alignment.cli.guarded import guarded
from alignment.cli.output import add_option, parse_arguments
from alignment.config.fields import checked_text
from alignment.config.options_chat import ChatOptions
from alignment.config.options_training import FaultOptions
from alignment.run.activity import ACTIVITY

_ABOUT = """\
Chat with a trained model. Answers are printed as they are generated, with the chat template, the stop tokens and the
adapter of the model; the base of an adapter is quantized as in training. --compare answers with a second model too,
with the same seed. Sampling options that are not set have the values of the model's generation_config.json. Ctrl-C
stops an answer; Ctrl-D or /quit ends the command. If stdin is not a terminal, each line is answered, and only answers
are written to stdout."""


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment chat") -> None:
    """Chat, then exit with status 0, 1 after an error, 2 after a usage error, or 130 after Ctrl-C while loading."""
    parser = _parser(program)
    given = vars(parse_arguments(parser, argv))
    if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        reason = f"must run in a single process, but WORLD_SIZE is {ranks[:40]}; start it without a launcher"
        parser.exit(1, f"error: {program} {reason}\n")
    sys.exit(guarded(lambda: _run(given.pop("run"), given.pop("compare"), ChatOptions(**given))))


def _parser(program: str) -> ArgumentParser:
    parser = ArgumentParser(prog=program, description=_ABOUT, allow_abbrev=False)
    parser.add_argument(
        "run", metavar="RUN",
        help="output folder of a run, a checkpoint, any other folder with a full model or an adapter, or a Hub name",
    )  # fmt: skip
    parser.add_argument(
        "--compare", metavar="MODEL", nargs="?", const="",
        help="answer with this model as well; without a value, with the model that the run started from",
    )  # fmt: skip
    for field in fields(ChatOptions):
        add_option(parser, ChatOptions, field)
    return parser


def _run(run: str, compared: str | None, options: ChatOptions) -> None:
    run, compared = checked_text("RUN", run), compared and checked_text("compare", compared)
    ACTIVITY.limits = FaultOptions(hang_timeout=math.inf, hang_timeout_first=math.inf)  # a user may think for hours
    from alignment.cli.chat_session import converse, load_speakers

    speakers = load_speakers(run, compared, options)
    with_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not with_terminal:
        converse(speakers, options.seed, with_terminal)
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C no longer ends the command
    try:
        converse(speakers, options.seed, with_terminal)
    finally:
        signal.signal(signal.SIGINT, before)
