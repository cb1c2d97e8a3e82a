"""Tokenize the data and plan a run without a GPU: `python launch/prepare.py launch/recipes/kto.yaml --ranks 16`.

Takes the options of `train.py`, which then reads the tokenized rows from the cache. The implementation is in
`alignment/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if (ROOT / "alignment" / "__init__.py").is_file():
    # Run from a source checkout without installation, ahead of any other package called `alignment`.
    sys.path.insert(0, str(ROOT))

from alignment.cli.prepare import main  # noqa: E402

if __name__ == "__main__":
    main(program="launch/prepare.py")
