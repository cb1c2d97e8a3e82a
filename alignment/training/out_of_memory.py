"""What a run says when a GPU is out of memory: where, with which micro-batch, what was predicted, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from alignment.config.errors import TrainingError, counted
from alignment.reporting.formats import size
from alignment.run.activity import ACTIVITY
from alignment.run.ending import LESS_MEMORY, reason_of
from alignment.training.context import RunContext
from alignment.training.run_engines import RunEngines

_SHOWN = 8  # lengths of a micro-batch


def out_of_memory(
    context: RunContext, lengths: Sequence[int], error: torch.OutOfMemoryError, where: str = ""
) -> TrainingError:
    """Return the error to raise for one of the allocator.

    Args:
        context: the run.
        lengths: number of tokens of each sequence of the micro-batch that was computed; empty if none was.
        error: the allocator's error.
        where: what was computed; empty if it follows the last completed step.
    """
    phase, plan = ACTIVITY.failed, context.memory_plan
    parts = [f"out of memory in phase {phase}, {where or f'after step {context.state.global_step}'}"]
    if lengths:
        longest = sorted(lengths, reverse=True)
        more = f" and {len(longest) - _SHOWN} more" if longest[_SHOWN:] else ""
        parts.append(
            f"{counted(len(longest), 'sequence')} of {', '.join(map(str, longest[:_SHOWN]))}{more} tokens in the "
            "micro-batch"
        )
    if plan is not None and (predicted := plan.peak(phase.removeprefix("eval "))):
        parts.append(f"predicted {size(predicted)}")
    record = context.phases.records.get(phase)
    if record is not None and record.peak_bytes:
        parts.append(f"measured {size(record.peak_bytes)} before it failed")
    changes = (plan.changes() if plan is not None else []) or LESS_MEMORY
    numbered = "; ".join(f"({number}) {change}" for number, change in enumerate(changes, 1))
    return TrainingError(f"{', '.join(parts)}. What uses less memory: {numbered} ({reason_of(error)})")


@contextlib.contextmanager
def memory_explained(context: RunContext, engines: RunEngines) -> Iterator[None]:
    """Raise :func:`out_of_memory` for an error of the allocator within this context."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        _, lengths = engines.window_pass.failed if engines.ready else (0, ())
        raise out_of_memory(context, lengths, error) from error
