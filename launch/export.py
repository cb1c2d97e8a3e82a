"""Export a checkpoint, a model or an adapter as a full model: `python launch/export.py SOURCE OUT --dtype bfloat16`.

Runs in a single process, without a GPU. The implementation is in `alignment/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if (ROOT / "alignment" / "__init__.py").is_file():
    # Run from a source checkout without installation, ahead of any other package called `alignment`.
    sys.path.insert(0, str(ROOT))

from alignment.cli.export import main  # noqa: E402

if __name__ == "__main__":
    main(program="launch/export.py")
