"""``python -m tools.architectures.liger [TYPE …]``: log-probs and gradients with and without Liger, on a GPU.

By default, all types supported by both Liger and transformers are compared. The exit status is 1 if a type differs by
more than fp32 rounding. Without a GPU, the tests make the same comparison in Triton's interpreter, for the types that
it supports.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers.utils import logging

from alignment.config.errors import ModelError
from alignment.internals.liger import kernels_by_type
from alignment.models.kernels import put_liger_kernels
from alignment.models.loading import disable_dropout
from tools.architectures.comparison import TOLERANCE, from_logits, relative, types
from tools.architectures.tiny import tiny_model


def compared(model_type: str, device: str = "cpu") -> dict[str, Any]:
    """Return the relative differences of ``logps`` and ``gradient``, and what is patched.

    ``modules`` are the classes of the kernels; ``functions`` and ``classes`` those of the modeling file. A ModelError
    says that Liger has no kernels for the type, or that they do not work with this transformers.
    """
    model = tiny_model(model_type).to(device).train()
    disable_dropout(model)
    plain = from_logits(model)
    file = sys.modules[type(model).__module__]
    before = dict(vars(file))
    put_liger_kernels(model, None)
    logps, gradient = relative(from_logits(model), plain)
    changed = [name for name in before if vars(file)[name] is not before[name]]
    return {
        "logps": logps,
        "gradient": gradient,
        "modules": sorted({m._get_name() for m in model.modules() if m._get_name().startswith("Liger")}),
        "functions": sorted(name for name in changed if not isinstance(before[name], type)),
        "classes": sorted(name for name in changed if isinstance(before[name], type)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each type; return the exit status."""
    if not torch.cuda.is_available():
        print("no CUDA GPU found by torch", file=sys.stderr)
        return 2
    logging.set_verbosity_error()
    good = True
    for name in argv or sorted(kernels_by_type().keys() & types().keys()):
        try:
            found = compared(name, "cuda")
        except ModelError as error:
            print(f"| {name} | refused | {error} |", flush=True)
            continue
        same = max(found["logps"], found["gradient"]) < TOLERANCE
        good = good and same
        word = "same" if same else "**differs**"
        print(f"| {name} | {word} | {found['logps']:.0e} | {found['gradient']:.0e} |", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
