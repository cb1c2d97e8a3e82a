"""Options of sbatch that are handed on as they are: which may be, and what else they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping

from alignment.config.errors import OptionError

# Options of sbatch that have an option of their own here.
OWN = {
    "--nodes": "--nodes", "--time": "--time", "--partition": "--partition", "--account": "--account", "--qos": "--qos",
    "--job-name": "--job-name", "--signal": "--signal", "--array": "--seeds", "--mem": "--mem",
    "--cpus-per-task": "--cpus-per-task", "--gpus-per-node": "--gpus", "--gpus": "--gpus", "--gpus-per-task": "--gpus",
    "--gres": "--gpus", "--ntasks-per-node": "--gpus", "--ntasks-per-gpu": "--gpus", "--ntasks": "--gpus",
}  # fmt: skip
# The same of the job that prepares; "" where it leaves no choice. Memory and quality of service it does not ask for.
OWN_OF_PREPARATION = {
    **{name: "" if ours in ("--nodes", "--gpus", "--seeds", "--signal") else ours for name, ours in OWN.items()},
    **{"--time": "--prepare-time", "--partition": "--prepare-partition"},
}
del OWN_OF_PREPARATION["--mem"], OWN_OF_PREPARATION["--qos"]
_SCRIPTS = "the script depends on its own {}; remove it"
_ANSWER = "sbatch would not answer with the job's number; remove it"
_REFUSED = {
    **dict.fromkeys(("--requeue", "--no-requeue", "--open-mode", "--output", "--chdir", "--wrap"), _SCRIPTS),
    **dict.fromkeys(("--parsable", "--help", "--usage", "--version", "--wait"), _ANSWER),
    "--test-only": "it would submit nothing; set --print to see the script",
}
_LONG = {
    "-A": "--account", "-a": "--array", "-C": "--constraint", "-c": "--cpus-per-task", "-D": "--chdir",
    "-d": "--dependency", "-e": "--error", "-G": "--gpus", "-h": "--help", "-i": "--input", "-J": "--job-name",
    "-k": "--no-kill", "-M": "--clusters", "-m": "--distribution", "-N": "--nodes", "-n": "--ntasks",
    "-O": "--overcommit", "-o": "--output", "-p": "--partition", "-q": "--qos", "-S": "--core-spec", "-t": "--time",
    "-u": "--usage", "-V": "--version", "-v": "--verbose", "-W": "--wait",
}  # fmt: skip
_WITHOUT_VALUE = "HhkOQsuVvW"  # letters that others may follow: -Hn4
_VARIABLES = {  # where it is not the option's name
    "--time": "TIMELIMIT", "--array": "ARRAY_INX", "--mem": "MEM_PER_NODE", "--switches": "REQ_SWITCH",
    "--verbose": "DEBUG",
}  # fmt: skip


def check_further(option: str, text: str, own: Mapping[str, str] = OWN) -> str:
    """An option of sbatch, or several, that may be handed on.

    Args:
        option: of ours, which gives it.
        text: as it will stand in the header.
        own: options of sbatch that may not be there, and ours that are to be given in their place.

    Raises:
        OptionError: it is none, or it would be in the way of what the request or the script says.
    """
    where = f"{option}={text!r}"
    names = list(named(text)) if text.startswith("-") and text.isprintable() else []
    if not names:
        raise OptionError(f"{where}: expected an option of sbatch, such as {option}=--constraint=ib")
    for name in names:
        full = next(
            (full for full in (name, *own, *_REFUSED) if full in {**own, **_REFUSED} and _is(name, full)), name
        )
        if full in _REFUSED:
            raise OptionError(f"{where}: {_REFUSED[full].format(full)}")
        if full in own and not (full == "--gres" and "gpu" not in text):
            instead = f"set it by {own[full]}" if own[full] else "the job takes one task on one node; remove it"
            raise OptionError(f"{where}: {instead}")
    return text


def names_option(text: str, full: str) -> bool:
    """Whether an option is among those in a text."""
    return any(_is(name, full) for name in named(text))


def _is(name: str, full: str) -> bool:
    """Whether sbatch may take ``name`` for an option: it takes any beginning of a long name that is no other's."""
    return name == full or (name.startswith("--") and full.startswith(name))


def named(text: str) -> Iterator[str]:
    """The options in a text, by their long names where they have one; nothing where quotes are not closed."""
    try:
        tokens = shlex.split(text)
    except ValueError:
        return
    for token in tokens:
        if token.startswith("--"):
            yield token.partition("=")[0]
        elif token.startswith("-"):
            letters = re.match(f"-([{_WITHOUT_VALUE}]*.?)", token)
            yield from (_LONG.get(f"-{letter}", f"-{letter}") for letter in (letters[1] if letters else ""))


def variables_of(options: Iterable[str]) -> set[str]:
    """The variables by which sbatch would take other values of these options (long names)."""
    return {f"SBATCH_{_VARIABLES.get(name, name[2:].replace('-', '_').upper())}" for name in options}
