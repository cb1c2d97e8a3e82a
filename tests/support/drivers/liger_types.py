"""Log-probs and gradients of tiny models with and without Liger's kernels, in Triton's interpreter: ``OUT TYPE …``.

A process of its own, because Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from support import interpreting  # noqa: F401 - first
from transformers.utils import logging

from tools.architectures.liger import compared

if __name__ == "__main__":
    logging.set_verbosity_error()
    out, *types = sys.argv[1:]
    Path(out).write_text(json.dumps({model_type: compared(model_type) for model_type in types}))
