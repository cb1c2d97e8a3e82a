"""Write a model's completions for prompts as rows to train on: `deepspeed launch/sample.py RUN --prompts FILE -n 4 …`.

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

from alignment.cli.sample import main  # noqa: E402

if __name__ == "__main__":
    main(program="launch/sample.py")
