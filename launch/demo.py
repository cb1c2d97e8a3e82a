"""The demo: `python launch/demo.py`, or `make demo`. A model from nothing; KTO, CPO, Online DPO; a table.

The work is in `alignment/demo/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if (ROOT / "alignment" / "__init__.py").is_file():
    # A source checkout runs without being installed, and before any other package called `alignment`.
    sys.path.insert(0, str(ROOT))

from alignment.demo.run import main  # noqa: E402

if __name__ == "__main__":
    main()
