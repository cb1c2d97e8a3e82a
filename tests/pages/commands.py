"""The commands of this project in a shell script, without the launchers that precede them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

LAUNCHERS = ("deepspeed", "torchrun", "srun", "accelerate", "python", "python3", "sbatch", "nohup", "mpirun")
_KEYWORDS = {"do", "then", "else", "time", "!", "exec", "env", "nohup", "(", "{", "if", "while", "until"}
_SCRIPT = re.compile(r"(?:\S*/)?launch/(?:slurm/)?(\w+)\.(?:py|sbatch)")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_REDIRECTION = re.compile(r"(?:\d+|&)?(?:>>|>|<)(?:&\d|.*)")
_RANKS = re.compile(r"(?:--num_gpus|--nproc_per_node|--nproc-per-node|--ntasks)[= ](\d+)")


@dataclass(frozen=True)
class Command:
    """A command of this project.

    Attributes:
        name: ``train``, ``prepare``, ``submit`` and so on.
        arguments: the arguments of the command.
        ranks: the number of processes started by a preceding launcher.
    """

    name: str
    arguments: tuple[str, ...]
    ranks: int = 1


def commands_of(script: str) -> Iterator[Command]:
    """Return the commands of this project in a Bash script, in order.

    Raises:
        ValueError: quotation marks are unbalanced.
    """
    for words in simple_commands(script):
        if words[:2] in (["bash", "-c"], ["sh", "-c"]) and len(words) > 2:
            yield from commands_of(words[2])
            continue
        nested = [i for i, word in enumerate(words) if word in ("bash", "sh") and words[i + 1 : i + 2] == ["-c"]]
        if nested and words[0] in LAUNCHERS:
            yield from commands_of(words[nested[0] + 2])
            continue
        if (found := _command(words)) is not None:
            yield found


def _command(words: list[str]) -> Command | None:
    if words[0].rpartition("/")[2] == "deepspeed-alignment":
        return _named(words[1:], words[1:2], 1)
    if words[0] not in LAUNCHERS:
        return None
    ranks = _RANKS.search(" ".join(words))
    number = int(ranks[1]) if ranks and words[0] != "python" else 1
    for index, word in enumerate(words[1:], 1):
        script = _SCRIPT.fullmatch(word)
        if script:
            return Command(script[1], tuple(words[index + 1 :]), number)
        if word in ("-m", "--module") and words[index + 1 : index + 2] == ["alignment"]:
            return _named(words[index + 2 :], words[index + 2 : index + 3], number)
        if word.rpartition("/")[2] == "deepspeed-alignment":
            return _named(words[index + 1 :], words[index + 1 : index + 2], number)
    return None


def _named(words: list[str], name: list[str], ranks: int) -> Command:
    return Command(name[0] if name else "--help", tuple(words[1:]), ranks)


def simple_commands(script: str) -> Iterator[list[str]]:
    """Return the words of each simple command, without preceding assignments, keywords and redirections."""
    for segment in _segments(script):
        words = shlex.split(segment, comments=True)
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


def _segments(script: str) -> Iterator[str]:
    """Split a script without here-documents at newlines, ``;``, ``&`` and ``|`` outside quotes and ``$(…)``."""
    segment, quote, depth, comment = "", "", 0, False
    text, index = script.replace("\\\n", " "), 0
    while index < len(text):
        char, before, after = text[index], text[index - 1 : index], text[index + 1 : index + 2]
        if comment and char != "\n":
            pass
        elif quote:
            segment += char
            if char == "\\" and quote == '"':
                segment, index = segment + after, index + 1
            elif char == quote:
                quote = ""
        elif char == "\\":
            segment, index = segment + char + after, index + 1
        elif char in "'\"":
            segment, quote = segment + char, char
        elif char == "#" and (not before or before.isspace()):
            comment = True
        elif char in "()":
            depth = max(0, depth + (1 if char == "(" else -1))
            segment += char
        elif char == "\n" or (char in ";&|" and not depth and not (char == "&" and ">" in (before, after))):
            yield segment
            here = _HEREDOC.search(segment) if char == "\n" else None
            segment, comment, depth = "", False, depth if char != "\n" else 0
            if here:
                end = re.compile(rf"^\s*{here[2]}\s*$", re.MULTILINE).search(text, index)
                index = end.end() - 1 if end else len(text)
        else:
            segment += char
        index += 1
    if quote:
        raise ValueError(f"no closing {quote} in: {segment.strip()[:80]}")
    yield segment
