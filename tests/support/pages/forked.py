"""The ``python`` and ``deepspeed-alignment`` commands for pages, forked from a process with the libraries imported.

Starting Python for a command of this project takes 9 s of CPU time for imports alone. The commands in a folder on
``PATH`` pass such calls to the server of :mod:`tools.ranks`, and every other call to the real ``python``. A page still
runs the same script in Bash, with the same arguments, environment and working directory.

The model with which all tutorials start is created once, and copied for the others, also where nothing is forked.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from support.pages.blocks import ROOT

# Commands that import torch; starting one of the others takes less time than a fork would save.
_COMMANDS = ("train", "precompute", "prepare", "plan", "export", "sample", "compare")
_LAUNCHED = "|".join(f"launch/{name}.py|./launch/{name}.py" for name in _COMMANDS)
_PYTHON = """\
#!/bin/sh
{fork}
if [ "$*" = "{shared}" ]; then
  if [ ! -e {kept}.done ]; then
    {python} "$@" >{kept}.out 2>&1 || {{ cat {kept}.out; exit 1; }}
    cp -r outputs/support {kept} && touch {kept}.done
  else
    mkdir -p outputs && cp -r {kept} outputs/support
  fi
  exec cat {kept}.out
fi
exec {python} "$@"
"""
_FORK = """\
case "$1" in
  {launched})
    script="$1"; shift
    exec {python} {client} {address} "$script" "$@" ;;
esac"""
_SHARED = "-m examples.support outputs/support"
_CONSOLE = """\
#!/bin/sh
case "$1" in
  {names}) exec {python} {client} {address} {module} "$@" ;;
esac
exec {python} -m alignment "$@"
"""
_CLIENT = """\
import os, sys
sys.path.insert(0, {root!r})
from tools.ranks import RankServer

address, script, *arguments = sys.argv[1:]
outcome = RankServer(address=address).run(script, *arguments, nproc=1, timeout=1500, check=False)
sys.stdout.write(outcome.stdout)
sys.stdout.flush()
sys.stderr.write(outcome.stderr)
sys.exit(outcome.returncode if outcome.returncode >= 0 else 128 - outcome.returncode)
"""
_MODULE = "from alignment.cli.commands import main\n\nmain()\n"


def forked_python(folder: Path, address: str) -> list[str]:
    """The command that runs a script of Python in a forked process; ``folder`` is that of :func:`make_commands`."""
    return [sys.executable, str(folder / "client.py"), address]


def make_commands(folder: Path, kept: Path, address: str = "") -> Path:
    """Write the two commands and return their folder.

    Args:
        folder: where to write them.
        kept: where the first model of the tutorials is stored once it exists; the same for all folders.
        address: the address of the server; without one, nothing is forked.
    """
    folder.mkdir(parents=True)
    client, module = folder / "client.py", folder / "deepspeed_alignment.py"
    values = {"python": sys.executable, "client": client, "address": address, "module": module}
    fork = _FORK.format(launched=_LAUNCHED, **values) if address else ""
    scripts = {"python": _PYTHON.format(fork=fork, shared=_SHARED, kept=kept, **values)}
    if address:
        client.write_text(_CLIENT.format(root=str(ROOT)))
        module.write_text(_MODULE)
        scripts["deepspeed-alignment"] = _CONSOLE.format(names="|".join(_COMMANDS), **values)
    for name, text in scripts.items():
        (folder / name).write_text(text)
        os.chmod(folder / name, 0o755)
    return folder
