"""The ``status`` command: the status of a run, read from the files in its output folder."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from alignment.cli.output import leave_with_help, surviving_closed_output
from alignment.cli.status_text import status_line, status_lines
from alignment.config.errors import AlignmentError
from alignment.engines.inspecting.life import SILENT_S
from alignment.engines.inspecting.run import RunReader
from alignment.engines.inspecting.view import RunView
from alignment.reporting.status_file import STATUS

_ABOUT = """\
Show the status of a run, read from its output folder: state, step, time left, speed, last metrics, checkpoints and
whether they are complete, phase times, attempts. A run whose process has died is reported with "no heartbeat since".
On a file system without locks, the files of the run are watched for up to 20 seconds to find this out."""
_POLL_S, _INTERVAL_S = 0.5, 2.0
_CLEAR_BELOW, _UP = "\x1b[J", "\x1b[{}F"


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment status") -> None:
    """Show the status and exit: 0 on success, 1 if it cannot be read, 2 after a usage error.

    Args:
        argv: arguments without the program's name. Defaults to those of this process.
        program: the command's name in usage lines.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(program)
    leave_with_help(parser, arguments)
    options = parser.parse_args(arguments)
    if options.interval is not None and not options.follow:
        parser.error(
            f"argument --interval: {options.interval:g} has no effect without --follow; add --follow or drop it"
        )
    code = 0
    with surviving_closed_output(), contextlib.suppress(KeyboardInterrupt):
        code = _run(options)
    sys.exit(code)


def _run(options: argparse.Namespace) -> int:
    try:
        reader = RunReader(Path(options.run).expanduser(), read_all=options.check)
        view = _follow(reader, options) if options.follow else settled(reader)
    except (AlignmentError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    if not options.follow:
        print(json.dumps(view.to_dict()) if options.json else "\n".join(status_lines(view)), flush=True)
    unread = [problem for problem in view.problems if problem.startswith(STATUS)]
    for problem in unread:
        print(f"error: {options.run}: {problem}", file=sys.stderr)
    return 1 if unread else 0


def settled(reader: RunReader) -> RunView:
    """The run, as soon as it is known whether its process is alive."""
    view, told = reader.read(), False
    while not view.settled:
        if not told:
            print(f"watching {view.folder} for a heartbeat, up to {SILENT_S:.0f} s", file=sys.stderr, flush=True)
            told = True
        time.sleep(_POLL_S)
        view = reader.read()
    return view


def _follow(reader: RunReader, options: argparse.Namespace) -> RunView:
    """Show every change until the run ends: in place on a terminal, otherwise one line per change."""
    screen = _Screen() if sys.stdout.isatty() and not options.json else None
    said, shown = "", time.monotonic()
    while True:
        view = reader.read()
        text = json.dumps(view.to_dict()) if options.json else status_line(view)
        if screen is not None:
            screen.show(status_lines(view))
        elif text != said:
            print(text, flush=True)
            said = text
        if view.over:
            return view
        now = time.monotonic()
        shown = max(shown + (options.interval or _INTERVAL_S), now)  # do not make up for missed refreshes
        time.sleep(shown - now)


class _Screen:
    """Lines that overwrite the previous ones."""

    def __init__(self) -> None:
        self._count = 0

    def show(self, lines: Sequence[str]) -> None:
        """Replace the previous lines; cut to the size of the terminal."""
        size = shutil.get_terminal_size()
        kept = [line[: max(1, size.columns - 1)] for line in lines[: max(1, size.lines - 1)]]
        above = _UP.format(self._count) if self._count else ""
        print(f"{above}{_CLEAR_BELOW}" + "\n".join(kept), flush=True)
        self._count = len(kept)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, from 0.1 to 86400")
    return value


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=_ABOUT, allow_abbrev=False)
    add = parser.add_argument
    add("run", metavar="RUN", help="output folder of the run")
    add("--json", action="store_true", help="print one JSON object; with --follow, one per line for each change")
    add("--follow", action="store_true", help="show changes until the run ends; Ctrl-C does not affect the run")
    add(
        "--interval",
        type=_seconds,
        metavar="SECONDS",
        help=f"refresh interval of --follow [{_INTERVAL_S:g}]",
    )
    add(
        "--check",
        action="store_true",
        help="compare checkpoints with their checksums (reads all of them)",
    )
    return parser


if __name__ == "__main__":
    main()
