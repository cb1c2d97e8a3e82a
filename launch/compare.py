"""Count how often a model's answers are better than others': `deepspeed launch/compare.py RUN --prompts FILE …`.

Can be started with `deepspeed`, `torchrun`, `srun` or plain `python` (one process). The implementation is in
`alignment/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if (ROOT / "alignment" / "__init__.py").is_file():
    # Run from a source checkout without installation, ahead of any other package called `alignment`.
    sys.path.insert(0, str(ROOT))

from alignment.cli.compare import main  # noqa: E402

if __name__ == "__main__":
    main(program="launch/compare.py")
