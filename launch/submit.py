"""Submit training to SLURM: `python launch/submit.py launch/recipes/kto.yaml --nodes 2 --gpus 8 --time 1-00:00:00 …`.

On a login node; without torch. The work is in `alignment/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if (ROOT / "alignment" / "__init__.py").is_file():
    # A source checkout runs without being installed, and before any other package called `alignment`.
    sys.path.insert(0, str(ROOT))

from alignment.cli.submit import main  # noqa: E402

if __name__ == "__main__":
    main(program="launch/submit.py")
