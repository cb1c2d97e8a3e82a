"""The ``report`` command: write the HTML report of a run, or compare several runs, from their output folders."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from alignment.cli.output import run_reader
from alignment.reporting.page import PAGE, render
from alignment.reporting.run_content import comparison, read_content
from alignment.run.durable import replace_text

_COMPARISON = "comparison.html"
_ABOUT = f"""\
Write the report of a run, {PAGE}, from the files in its output folder. The run may be finished, interrupted, killed or
in progress. With several runs, compare their options, final metrics and curves. The page is a single file that opens
without a network."""


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment report") -> None:
    """Write the report, then exit with status 0, 1 if a file cannot be read or written, or 2 after a usage error."""
    run_reader(_write, _parser(program), argv)


def _parser(program: str) -> ArgumentParser:
    parser = ArgumentParser(prog=program, description=_ABOUT, allow_abbrev=False)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="output folder of a run")
    where = f"file to write [{PAGE} in the run's folder, or {_COMPARISON} for several runs]"
    parser.add_argument("--out", metavar="FILE", help=where)
    return parser


def _write(options: Namespace) -> None:
    contents = [read_content(Path(run).expanduser()) for run in options.runs]
    page, target = contents[0].page, Path(contents[0].page.folder) / PAGE
    if len(contents) > 1:
        page, target = comparison(contents), Path(_COMPARISON)
    target = Path(options.out).expanduser() if options.out else target
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_text(target, render(page))
    print(target, flush=True)
