"""tqdm: the progress bars that are open in this process."""

from __future__ import annotations

import sys
from typing import Any


def open_bars() -> list[Any]:
    """Every open progress bar of this process, of whatever class; empty if tqdm has not been imported.

    An error message has to close them first: an open bar leaves the cursor in the middle of a line and draws itself
    once more as the interpreter exits. tqdm keeps its bars in a private set, of which a subclass may have another.
    Seen with tqdm 4.70.
    """
    tqdm = sys.modules.get("tqdm")
    kinds = [tqdm.tqdm] if tqdm is not None else []
    bars: dict[int, Any] = {}
    for kind in kinds:
        kinds += kind.__subclasses__()
        bars |= {id(bar): bar for bar in vars(kind).get("_instances", ())}
    return list(bars.values())
