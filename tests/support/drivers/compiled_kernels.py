"""Compile the head's kernels for NVIDIA cards that need not be there; print, in JSON, what came out.

Exit status 77 if the installed Triton has no compiler for them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from typing import Any

CAPABILITIES = (75, 80, 90, 120)  # the first card of each generation
FLAGS = ("SCALED", "CAPPED", "HAS_BIAS")
KINDS = {
    "barrier": r"\bbar\.sync|\bbarrier\.sync",
    "load": r"\bld\.global(?!\.\S*nc)",
    "store": r"\bst\.global",
}


def signature(kernel: Any, dtype: str, constants: dict[str, Any]) -> dict[str, str]:
    """Types of the arguments; ``dtype`` is that of coefficients and bias."""
    types = {"stride": "i32", "out_stride": "i32", "columns": "i32", "scale": "fp32", "softcap": "fp32"}
    types |= {"targets_ptr": "*i64", "bias_ptr": f"*{dtype}"}
    if kernel.__name__ == "differentiate":
        types["out_ptr"] = f"*{dtype}"
    return {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names}


def order(ptx: str) -> list[str]:
    """Loads, barriers and stores in their order; neighbors of a kind are one."""
    found: list[str] = []
    for line in ptx.splitlines():
        kind = next((name for name, pattern in KINDS.items() if re.search(pattern, line)), None)
        if kind is not None and found[-1:] != [kind]:
            found.append(kind)
    return found


def main() -> int:
    """Print what came out."""
    if importlib.util.find_spec("triton.backends.nvidia") is None:
        print("this build of triton does not compile for NVIDIA cards", file=sys.stderr)
        return 77
    from alignment.internals.triton import compiled_for
    from alignment.models.tiles import fused, kernels

    found = []
    for capability in CAPABILITIES:
        for everything in (False, True):
            flags = dict.fromkeys(FLAGS, everything) | {"BLOCK": fused.block_of(128000)}
            jobs = [(kernels.measure, "bf16", flags | {"STATS": everything})]
            more = flags | {"HAS_TOTAL": everything, "HAS_GRAD": not everything}
            jobs += [(kernels.differentiate, dtype, more) for dtype in ("fp32", "bf16", "fp16")]
            for kernel, dtype, constants in jobs:
                types = signature(kernel, dtype, constants)
                made = compiled_for(capability, kernel, types, constants, fused.WARPS)
                about = {"capability": capability, "name": kernel.__name__, "dtype": dtype}
                found.append({**about, "cubin": len(made["cubin"]), "order": order(made["ptx"])})
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
