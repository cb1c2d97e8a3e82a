"""Compute and keep the log-probs of a reference: `deepspeed launch/precompute.py launch/recipes/kto.yaml`.

The options are those of `train.py`, which computes what is missing itself. The same under `torchrun`, `srun` and plain
`python` (one process). The work is in `alignment/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if (ROOT / "alignment" / "__init__.py").is_file():
    # A source checkout runs without being installed, and before any other package called `alignment`.
    sys.path.insert(0, str(ROOT))

from alignment.cli.precompute import main  # noqa: E402

if __name__ == "__main__":
    main(program="launch/precompute.py")
