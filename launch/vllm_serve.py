"""Start the vLLM server of a recipe: `python launch/vllm_serve.py RECIPE --use_vllm --run`.

Takes the options of `train.py`. The implementation is in `alignment/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if (ROOT / "alignment" / "__init__.py").is_file():
    # Run from a source checkout without installation, ahead of any other package called `alignment`.
    sys.path.insert(0, str(ROOT))

from alignment.cli.vllm_serve import main  # noqa: E402

if __name__ == "__main__":
    main(program="launch/vllm_serve.py")
