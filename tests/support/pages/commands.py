"""The commands of this project in a shell script, without the launchers that precede them."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

LAUNCHERS = ("deepspeed", "torchrun", "srun", "accelerate", "python", "python3", "sbatch", "nohup", "mpirun")
_KEYWORDS = {"do", "then", "else", "time", "!", "exec", "env", "nohup", "(", "{", "if", "while", "until"}
_SCRIPT = re.compile(r"(?:\S*/)?launch/(?:slurm/)?(\w+)\.(?:py|sbatch)")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1(?=.*?\n)(.*?\n)*?\s*\2$", re.MULTILINE)
_SUBSTITUTION = re.compile(r"\$\([^()]*\)")
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
_REDIRECTION = re.compile(r"(?:\d+|&)?(?:>>|>|<)(?:&\d|.*)")


@dataclass(frozen=True)
class Command:
    """A command of this project.

    Attributes:
        name: ``train``, ``prepare``, ``submit`` and so on.
        arguments: the arguments of the command.
    """

    name: str
    arguments: tuple[str, ...]


def commands_of(script: str) -> Iterator[Command]:
    """Return the commands of this project in a Bash script, in order.

    Raises:
        ValueError: quotation marks are unbalanced.
    """
    for words in simple_commands(script):
        nested = [i for i, word in enumerate(words) if word in ("bash", "sh") and words[i + 1 : i + 2] == ["-c"]]
        if nested and (nested[0] == 0 or words[0] in LAUNCHERS):
            yield from commands_of(words[nested[0] + 2])
            continue
        if (found := _command(words)) is not None:
            yield found


def _command(words: list[str]) -> Command | None:
    if words[0].rpartition("/")[2] == "deepspeed-alignment":
        return _named(words[1:])
    if words[0] not in LAUNCHERS:
        return None
    for index, word in enumerate(words[1:], 1):
        script = _SCRIPT.fullmatch(word)
        if script:
            return Command(script[1], tuple(words[index + 1 :]))
        if word in ("-m", "--module") and words[index + 1 : index + 2] == ["alignment"]:
            return _named(words[index + 2 :])
        if word.rpartition("/")[2] == "deepspeed-alignment":
            return _named(words[index + 1 :])
    return None


def _named(words: list[str]) -> Command:
    return Command(words[0] if words else "--help", tuple(words[1:]))


def simple_commands(script: str) -> Iterator[list[str]]:
    """Return the words of each simple command, without here-documents, assignments, keywords and redirections."""
    text = _HEREDOC.sub("", _SUBSTITUTION.sub("VALUE", script.replace("\\\n", " ")))
    lexer = shlex.shlex(_COMMENT.sub("", text), posix=True, punctuation_chars=";&|\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    for ends, group in itertools.groupby(lexer, lambda word: not word.strip(";&|\n")):
        words = [] if ends else list(group)
        while words and (words[0] in _KEYWORDS or re.match(r"[A-Za-z_]\w*=", words[0])):
            del words[0]
        if kept := list(_without_redirections(words)):
            yield kept


def _without_redirections(words: list[str]) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        if _REDIRECTION.fullmatch(word):
            if word.endswith((">", "<")):
                next(rest, None)
            continue
        yield word
