"""Submit training to SLURM: `python launch/submit.py launch/recipes/kto.yaml --nodes 2 --gpus 8 --time 1-00:00:00 …`.

Run it on a login node. Does not import torch. The implementation is in `alignment/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if (ROOT / "alignment" / "__init__.py").is_file():
    # Run from a source checkout without installation, ahead of any other package called `alignment`.
    sys.path.insert(0, str(ROOT))

from alignment.cli.submit import main  # noqa: E402

if __name__ == "__main__":
    main(program="launch/submit.py")
