"""Tokenise and plan a run without a GPU: `python launch/prepare.py launch/recipes/kto.yaml --ranks 16`.

The options are those of `train.py`, which then finds the tokenised rows in the cache. The work is in `alignment/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if (ROOT / "alignment" / "__init__.py").is_file():
    # A source checkout runs without being installed, and before any other package called `alignment`.
    sys.path.insert(0, str(ROOT))

from alignment.cli.prepare import main  # noqa: E402

if __name__ == "__main__":
    main(program="launch/prepare.py")
