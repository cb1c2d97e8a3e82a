"""Compute and store the log-probs of a reference: `deepspeed launch/precompute.py launch/recipes/kto.yaml`.

Takes the options of `train.py`, which computes missing log-probs itself. Can be started with `deepspeed`, `torchrun`,
`srun` or plain `python` (one process). The implementation is in `alignment/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if (ROOT / "alignment" / "__init__.py").is_file():
    # Run from a source checkout without installation, ahead of any other package called `alignment`.
    sys.path.insert(0, str(ROOT))

from alignment.cli.precompute import main  # noqa: E402

if __name__ == "__main__":
    main(program="launch/precompute.py")
