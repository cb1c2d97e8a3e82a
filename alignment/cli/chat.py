"""The ``chat`` command: a conversation with a trained model in the terminal, or answers to the lines of a pipe."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from alignment.cli.guarded import run_alone
from alignment.config.fields import checked_text, option_fields, validated, words
from alignment.config.options_online import OnlineOptions

_ABOUT = """\
Chat with a trained model, loaded as in training, with its adapter, chat template and stop tokens. --temperature 0
always takes the most likely token. Ctrl-C stops an answer; Ctrl-D or /quit ends the command. If stdin is not a
terminal, each line is answered, and only answers are written to stdout."""
_SAMPLING = words("max_new_tokens temperature top_p top_k min_p repetition_penalty seed")
_DEFAULTS = {"max_new_tokens": 512, "seed": 42}  # the others have the values of generation_config.json


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment chat") -> None:
    """Chat, then exit with status 0, 1 after an error, 2 after a usage error, or 130 after Ctrl-C while loading."""
    run_alone(_run, _parser(program), argv)


def _parser(program: str) -> ArgumentParser:
    parser = ArgumentParser(prog=program, description=_ABOUT, allow_abbrev=False)
    what = "output folder of a run, a checkpoint, any other folder with a model or an adapter, or a Hub name"
    parser.add_argument("run", metavar="RUN", help=what)
    also = "answer with this model as well; without a value, with the model that the run started from"
    parser.add_argument("--compare", metavar="MODEL", nargs="?", const="", help=also)
    parser.add_argument("--system", metavar="TEXT", help="system message that every conversation starts with")
    for field in option_fields(OnlineOptions):
        if field.name in _SAMPLING:
            default, text = _DEFAULTS.get(field.name), field.metadata["help"].removesuffix(" Unset: all tokens.")
            text = f"{text} [{default or 'that of the model'}]"
            parser.add_argument(f"--{field.name}", metavar="VALUE", default=default, help=text)
    plain = "false: take each line as the prompt itself, for a model that was trained on prompts that are strings"
    parser.add_argument("--apply_chat_template", choices=("true", "false"), default="true", help=plain)
    parser.add_argument("--base", metavar="MODEL", help="base model of an adapter, instead of the one it names")
    parser.add_argument("--use_cpu", action="store_true", help="compute on the CPU even if there is a GPU")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with a model")
    return parser


def _run(given: Namespace) -> None:
    checked_text("system", given.system or "")
    sampling = {name: value for name in _SAMPLING if (value := getattr(given, name)) is not None}
    if sampling.get("temperature") in ("0", "0.0"):  # greedy
        sampling |= {"temperature": 1.0, "top_k": 1}
    given.sampling = validated(OnlineOptions, sampling)
    from alignment.cli.chat_session import chat

    chat(given)
