"""Write ``report.html`` on the first rank when a run ends, for whatever reason."""

from __future__ import annotations

from pathlib import Path

from alignment.reporting.durable import replace_text
from alignment.reporting.html.page import PAGE, render
from alignment.reporting.run_content import read_content
from alignment.reporting.run_view import LOG
from alignment.run.console import tell


def write_page(folder: Path, state: str | None = None) -> None:
    """Write the report of a run that has begun training.

    An error is printed and not raised: a report must not fail a run.

    Args:
        folder: the output folder.
        state: state of the run if ``status.json`` does not contain it yet.
    """
    try:
        if (folder / LOG).exists():
            draw_page(folder, state)
    except Exception as error:  # matplotlib, Jinja and the file system have their own exception classes
        tell(f"warning: could not write {PAGE}: {type(error).__name__}: {error}")


def draw_page(folder: Path, state: str | None) -> None:
    """Write the report; unlike :func:`write_page`, raise errors."""
    replace_text(folder / PAGE, render(read_content(folder, state=state).page))
