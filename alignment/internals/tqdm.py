"""tqdm: the open progress bars of this process."""

from __future__ import annotations

import sys
from typing import Any


def open_bars() -> list[Any]:
    """All open progress bars of this process, of any class; empty if tqdm has not been imported.

    They must be closed before an error message: an open bar leaves the cursor in the middle of a line and redraws
    itself when the interpreter exits. tqdm keeps its bars in a private set, and a subclass may have another one. Seen
    with tqdm 4.70.
    """
    tqdm = sys.modules.get("tqdm")
    kinds = [tqdm.tqdm] if tqdm is not None else []
    bars: dict[int, Any] = {}
    for kind in kinds:
        kinds += kind.__subclasses__()
        bars |= {id(bar): bar for bar in vars(kind).get("_instances", ())}
    return list(bars.values())
