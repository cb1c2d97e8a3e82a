"""``python -m tools.documentation`` writes the pages of docs/reference/ that are generated from the code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from tools.documentation.command_page import command_page
from tools.documentation.options import options_page
from tools.documentation.page import REFERENCE
from tools.documentation.trl_options import trl_options_page

PAGES: dict[str, Callable[[], str]] = {
    "cli.md": command_page,
    "options.md": options_page,
    "trl-options.md": trl_options_page,
}


def main(names: Sequence[str] = ()) -> None:
    """Write the named pages, or all."""
    for name in names or PAGES:
        (REFERENCE / name).write_text(PAGES[name](), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
