"""Chat with a trained model: `python launch/chat.py RUN`, `python launch/chat.py RUN --compare`.

Runs in a single process, on a GPU if there is one. The implementation is in `alignment/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if (ROOT / "alignment" / "__init__.py").is_file():
    # Run from a source checkout without installation, ahead of any other package called `alignment`.
    sys.path.insert(0, str(ROOT))

from alignment.cli.chat import main  # noqa: E402

if __name__ == "__main__":
    main(program="launch/chat.py")
