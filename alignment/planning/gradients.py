"""How the gradients of a window are accumulated: in which dtype, and how often they are reduced."""

from __future__ import annotations

from dataclasses import dataclass

from alignment.config.dtypes import DtypePlan
from alignment.config.options import AlignmentConfig

_GIB = 2**30


@dataclass(frozen=True)
class GradientPlan:
    """How gradients are accumulated over the micro-batches of a window.

    Attributes:
        accumulate: dtype of the accumulated gradients.
        once: whether each rank accumulates its own gradients, reduced once after the last micro-batch.
        ranks: number of ranks.
        device_bytes: bytes that this takes on a device; None if unknown.
    """

    accumulate: str
    once: bool
    ranks: int = 1
    device_bytes: int | None = None

    def describe(self) -> str:
        """Return a line for the start of a run."""
        text = f"gradients: accumulated in {self.accumulate}"
        if self.ranks > 1:
            text += ", reduced once per step" if self.once else ", reduced after every micro-batch"
        if self.device_bytes is None:
            return text
        return f"{text}, " + (
            f"{self.device_bytes / _GIB:.2f} GiB on each device" if self.device_bytes else "in host memory"
        )


def candidates(dtypes: DtypePlan, stage: int, ranks: int, *, offloaded: bool) -> list[GradientPlan]:
    """Return the ways to accumulate gradients, the best first; none without ZeRO.

    They are, in this order: full gradients in fp32 on each rank, reduced once per window (several ranks, stages 1 and
    2); the rank's partition in fp32; full gradients in the compute dtype, reduced once; and the partition in the
    compute dtype, which an offloaded optimizer keeps in host memory. If the DeepSpeed JSON sets the dtype, only
    candidates with that dtype are returned.

    Args:
        dtypes: dtypes of the run.
        stage: ZeRO stage.
        ranks: number of ranks.
        offloaded: whether the optimizer is in host memory.
    """
    if stage == 0:
        return []
    wide = dtypes.accumulation_is_free and stage != 1 and not (stage == 3 and offloaded)
    formats = dict.fromkeys(["float32", dtypes.accumulate] if wide else [dtypes.accumulate])
    full = [True] if ranks > 1 and stage < 3 else []
    partition = [] if full and stage == 1 else [False]  # stage 1 always reduces full gradients
    return [GradientPlan(accumulate, once, ranks) for accumulate in formats for once in (*full, *partition)]


def micro_batches(options: AlignmentConfig) -> int:
    """Return the largest number of micro-batches in a window on a rank.

    If tokens limit micro-batches, a window has as many as needed, at most one per row.
    """
    by_rows = options.max_tokens_per_batch is None and not options.auto_find_batch_size
    return (1 if by_rows else options.per_device_train_batch_size) * options.gradient_accumulation_steps
