"""A memory plan as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from alignment.planning.gpu_terms import RESERVE
from alignment.planning.plan import MemoryPlan, Parts

GB = 1e9


def lines(plan: MemoryPlan, card: float, memory: float = math.inf) -> Iterator[str]:
    """Yield the plan as a table of parts by phase in GB, for the GPU and the host, and whether it fits."""
    yield from _table("GPU memory, GB", plan.gpu)
    yield from _table("Host memory, GB", plan.host)
    yield verdict(plan, card, memory)


def verdict(plan: MemoryPlan, card: float, memory: float = math.inf) -> str:
    """Return whether a plan fits, and how closely."""
    need, host = plan.peak(reserve=True), plan.host_peak()
    limit = "" if math.isinf(memory) else f"; {host / GB:.1f} of {memory / GB:.1f} GB of host memory"
    return (
        f"{'fits' if plan.fits(card, memory) else 'does not fit'}: {need / GB:.1f} of {card / GB:.1f} GB on each GPU, "
        f"{RESERVE:.0%} in reserve{limit} (sequences of {plan.tokens} tokens, {checkpointing(plan)})"
    )


def checkpointing(plan: MemoryPlan) -> str:
    """Describe how many layers are recomputed."""
    if plan.checkpointed in (0, plan.layers):
        return f"gradient checkpointing of {'all' if plan.checkpointed else 'no'} layers"
    return f"gradient checkpointing of {plan.checkpointed} of {plan.layers} layers"


def as_json(plan: MemoryPlan, card: float, memory: float = math.inf) -> dict[str, Any]:
    """Return the plan in bytes."""
    return {
        "fits": plan.fits(card, memory),
        "tokens": plan.tokens,
        "checkpointed_layers": plan.checkpointed,
        "layers": plan.layers,
        "gpu_limit": int(card),
        "host_limit": None if math.isinf(memory) else int(memory),
        "gpu_peak": plan.peak(),
        "gpu_peak_with_reserve": plan.peak(reserve=True),
        "host_peak": plan.host_peak(),
        "gpu": {phase: {part: int(size) for part, size in parts.items()} for phase, parts in plan.gpu.items()},
        "host": {phase: {part: int(size) for part, size in parts.items()} for phase, parts in plan.host.items()},
    }


def _table(title: str, phases: dict[str, Parts]) -> Iterator[str]:
    names = list(dict.fromkeys(part for parts in phases.values() for part in parts))
    wide = max(map(len, [title, *names]))
    yield "  ".join([title.ljust(wide), *(phase.rjust(9) for phase in phases)])
    for name in names:
        cells = (f"{parts[name] / GB:.2f}" if name in parts else "" for parts in phases.values())
        yield "  ".join([name.ljust(wide), *(cell.rjust(9) for cell in cells)]).rstrip()
    totals = (f"{sum(parts.values()) / GB:.2f}" for parts in phases.values())
    yield "  ".join(["total".ljust(wide), *(total.rjust(9) for total in totals)])
    yield ""
