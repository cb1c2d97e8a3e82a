"""The ``report`` command: write the HTML report of a run, or compare several runs, from their output folders."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from alignment.cli.output import run_reader
from alignment.reporting.page import PAGE, render
from alignment.reporting.run_content import comparison, read_content
from alignment.reporting.run_view import runs_in
from alignment.run.durable import replace_text

_COMPARISON = "comparison.html"
_ABOUT = f"""\
Write the report of a run, {PAGE}, from the files in its output folder. The run may be finished, interrupted, killed or
in progress. With several runs, compare the options that differ, the best and the final metrics, and the curves. The
page is a single file that opens without a network."""


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment report") -> None:
    """Write the report, then exit with status 0, 1 if a file cannot be read or written, or 2 after a usage error."""
    run_reader(_write, _parser(program), argv)


def _parser(program: str) -> ArgumentParser:
    parser = ArgumentParser(prog=program, description=_ABOUT, allow_abbrev=False)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="output folder of a run, or a folder of such folders")
    where = f"file to write [{PAGE} in the run's folder, or {_COMPARISON} for several runs]"
    parser.add_argument("--out", metavar="FILE", help=where)
    return parser


def _write(options: Namespace) -> None:
    folders = [folder for run in options.runs for folder in runs_in(Path(run).expanduser())]
    contents = [read_content(folder) for folder in folders]
    page, target = contents[0].page, Path(contents[0].page.folder) / PAGE
    if len(contents) > 1:
        page, target = comparison(contents), Path(_COMPARISON)
    target = Path(options.out).expanduser() if options.out else target
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_text(target, render(page))
    print(target, flush=True)
