"""Show where a run stands, from the files in its output folder: `python launch/status.py outputs/kto --follow`.

It reads and changes nothing, and needs no GPU. The work is in `alignment/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if (ROOT / "alignment" / "__init__.py").is_file():
    # A source checkout runs without being installed, and before any other package called `alignment`.
    sys.path.insert(0, str(ROOT))

from alignment.cli.status import main  # noqa: E402

if __name__ == "__main__":
    main(program="launch/status.py")
