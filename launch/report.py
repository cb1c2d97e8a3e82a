"""Draw the report of a run, or compare several: `python launch/report.py outputs/kto`.

It only reads the output folders, writes one HTML file, and needs no GPU. The work is in `alignment/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if (ROOT / "alignment" / "__init__.py").is_file():
    # A source checkout runs without being installed, and before any other package called `alignment`.
    sys.path.insert(0, str(ROOT))

from alignment.cli.report import main  # noqa: E402

if __name__ == "__main__":
    main(program="launch/report.py")
