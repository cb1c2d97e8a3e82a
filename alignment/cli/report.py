"""The ``report`` command: write the HTML report of a run, or compare several runs, from their output folders."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from alignment.cli.output import leave_with_help, surviving_closed_output
from alignment.config.errors import AlignmentError, OutputError
from alignment.reporting.durable import replace_text
from alignment.reporting.html.page import PAGE, render, render_comparison
from alignment.reporting.run_content import read_content

_COMPARISON = "comparison.html"
_ABOUT = f"""\
Write the report of a run, {PAGE}, from the files in its output folder. The run may be finished, interrupted, killed or
in progress. With several runs, compare their options, final metrics and curves. The page is a single file that opens
without a network."""


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment report") -> None:
    """Write the report, then exit with status 0, 1 if a file cannot be read or written, or 2 after a usage error.

    Args:
        argv: arguments without the program name. Defaults to those of this process.
        program: program name in usage lines.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(program)
    leave_with_help(parser, arguments)
    options = parser.parse_args(arguments)
    code = 0
    with surviving_closed_output(), contextlib.suppress(KeyboardInterrupt):
        try:
            print(_write([Path(run).expanduser() for run in options.runs], options.out), flush=True)
        except (AlignmentError, OSError) as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            code = 1
    sys.exit(code)


def _write(folders: Sequence[Path], out: str | None) -> Path:
    contents = [read_content(folder) for folder in folders]
    several = len(contents) > 1
    target = Path(out).expanduser() if out else Path(_COMPARISON) if several else folders[0] / PAGE
    text = render_comparison(contents) if several else render(contents[0])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_text(target, text)
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror}; set --out to another file") from error
    return target


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=_ABOUT, allow_abbrev=False)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="output folder of a run")
    parser.add_argument(
        "--out", metavar="FILE", help=f"file to write [{PAGE} in the run's folder, or {_COMPARISON} for several runs]"
    )
    return parser
