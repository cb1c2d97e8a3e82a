"""Log-probs and gradients of tiny models with and without Liger's kernels, in Triton's interpreter: ``OUT TYPE …``.

A process of its own, because Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import interpreting  # noqa: F401 - first
import torch
from transformers.utils import logging

from alignment.internals.liger import put_into
from alignment.models.loading import disable_dropout
from tools.architectures.comparison import both_ways
from tools.architectures.tiny import tiny_model


def compared(model_type: str) -> dict[str, Any]:
    """Differences in parts of the largest log-prob and the gradient's norm, and what computes by a kernel."""
    model = tiny_model(model_type).train()
    disable_dropout(model)
    plain, gradient = both_ways(model)
    file = sys.modules[type(model).__module__]
    before = dict(vars(file))
    put_into(model, {})
    found, ours = both_ways(model)
    return {
        "logps": float((found - plain).abs().max() / plain.abs().max()),
        "gradient": float((ours - gradient).norm() / gradient.norm()),
        "modules": sorted({m._get_name() for m in model.modules() if m._get_name().startswith("Liger")}),
        "functions": sorted(n for n in before if vars(file)[n] is not before[n]),
        "classes": sorted(n for n in before if isinstance(before[n], type) and vars(file)[n] is not before[n]),
    }


if __name__ == "__main__":
    logging.set_verbosity_error()
    torch.manual_seed(0)
    out, *types = sys.argv[1:]
    Path(out).write_text(json.dumps({model_type: compared(model_type) for model_type in types}))
