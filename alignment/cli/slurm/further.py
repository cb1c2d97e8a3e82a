"""Options that are passed on to sbatch: which ones are allowed, and their long names and variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping

from alignment.config.errors import OptionError

# sbatch options that have a counterpart here.
OWN = {
    "--nodes": "--nodes", "--time": "--time", "--partition": "--partition", "--account": "--account", "--qos": "--qos",
    "--job-name": "--job-name", "--signal": "--signal", "--array": "--seeds", "--mem": "--mem",
    "--cpus-per-task": "--cpus-per-task", "--gpus-per-node": "--gpus", "--gpus": "--gpus", "--gpus-per-task": "--gpus",
    "--gres": "--gpus", "--ntasks-per-node": "--gpus", "--ntasks-per-gpu": "--gpus", "--ntasks": "--gpus",
}  # fmt: skip
# The same for the preparation job; "" if the value is fixed. It requests no memory and no quality of service.
OWN_OF_PREPARATION = {
    **{name: "" if ours in ("--nodes", "--gpus", "--seeds", "--signal") else ours for name, ours in OWN.items()},
    **{"--time": "--prepare-time", "--partition": "--prepare-partition"},
}
del OWN_OF_PREPARATION["--mem"], OWN_OF_PREPARATION["--qos"]
_SCRIPTS = "the script sets {} itself; remove it"
_ANSWER = "sbatch would not print the job id; remove it"
_REFUSED = {
    **dict.fromkeys(("--requeue", "--no-requeue", "--open-mode", "--output", "--chdir", "--wrap"), _SCRIPTS),
    **dict.fromkeys(("--parsable", "--help", "--usage", "--version", "--wait"), _ANSWER),
    "--test-only": "nothing would be submitted; use --print to show the script",
}
_LONG = {
    "-A": "--account", "-a": "--array", "-C": "--constraint", "-c": "--cpus-per-task", "-D": "--chdir",
    "-d": "--dependency", "-e": "--error", "-G": "--gpus", "-h": "--help", "-i": "--input", "-J": "--job-name",
    "-k": "--no-kill", "-M": "--clusters", "-m": "--distribution", "-N": "--nodes", "-n": "--ntasks",
    "-O": "--overcommit", "-o": "--output", "-p": "--partition", "-q": "--qos", "-S": "--core-spec", "-t": "--time",
    "-u": "--usage", "-V": "--version", "-v": "--verbose", "-W": "--wait",
}  # fmt: skip
_WITHOUT_VALUE = "HhkOQsuVvW"  # letters that can be combined with others: -Hn4
_VARIABLES = {  # if not derived from the option's name
    "--time": "TIMELIMIT", "--array": "ARRAY_INX", "--mem": "MEM_PER_NODE", "--switches": "REQ_SWITCH",
    "--verbose": "DEBUG",
}  # fmt: skip


def check_further(option: str, text: str, own: Mapping[str, str] = OWN) -> str:
    """Check one or several sbatch options that the user passes on.

    Args:
        option: our option that passes them on, for messages.
        text: the line of the script's header.
        own: sbatch options that have a counterpart here, mapped to it.

    Raises:
        OptionError: not an sbatch option, or one that conflicts with the request or the script.
    """
    where = f"{option}={text!r}"
    names = list(named(text)) if text.startswith("-") and text.isprintable() else []
    if not names:
        raise OptionError(f"{where}: expected an sbatch option, such as {option}=--constraint=ib")
    for name in names:
        full = next(
            (full for full in (name, *own, *_REFUSED) if full in {**own, **_REFUSED} and _is(name, full)), name
        )
        if full in _REFUSED:
            raise OptionError(f"{where}: {_REFUSED[full].format(full)}")
        if full in own and not (full == "--gres" and "gpu" not in text):
            instead = f"use {own[full]} instead" if own[full] else "the job runs one task on one node; remove it"
            raise OptionError(f"{where}: {instead}")
    return text


def names_option(text: str, full: str) -> bool:
    """Whether a text contains an option."""
    return any(_is(name, full) for name in named(text))


def _is(name: str, full: str) -> bool:
    """Whether sbatch may read ``name`` as the option ``full``: it accepts unambiguous prefixes of long names."""
    return name == full or (name.startswith("--") and full.startswith(name))


def named(text: str) -> Iterator[str]:
    """Yield the options in a text by their long names, if they have one; nothing if a quote is not closed."""
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
    """Return the environment variables from which sbatch reads these options (long names)."""
    return {f"SBATCH_{_VARIABLES.get(name, name[2:].replace('-', '_').upper())}" for name in options}
