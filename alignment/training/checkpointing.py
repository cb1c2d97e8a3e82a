"""How many layers gradient checkpointing recomputes, which is decided once per run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from alignment.config.fields import AUTO
from alignment.models.loading import checkpoint_first
from alignment.run.ranks import tell


class CheckpointedLayers:
    """The part of the run state that is the number of recomputed layers. It affects time and memory, not results.

    Args:
        asked: the option ``gradient_checkpointing``: a boolean or ``auto``.
        model: the policy's model, with gradient checkpointing enabled unless ``asked`` is false.
        planned: number of layers that ``auto`` means, from the memory plan; None without a plan.
    """

    def __init__(self, asked: Any, model: PreTrainedModel, planned: int | None) -> None:
        self.asked, self.model, self.planned = asked, model, planned
        self.layers, self.total = checkpoint_first(model, planned if asked == AUTO else None) if asked else (0, 0)

    def describe(self) -> str | None:
        """Return a line for the start of a run, unless the options say how many layers are recomputed."""
        if self.asked != AUTO or self.planned is None:
            return None
        return f"gradient checkpointing: {self.layers} of {self.total} layers"

    def state_dict(self) -> dict[str, Any]:
        """Return the number of recomputed layers."""
        return {"layers": self.layers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Recompute as many layers as the run did before, unless the options now say otherwise."""
        before = int(state["layers"])
        if self.asked == AUTO and self.layers != before:
            self.layers, self.total = checkpoint_first(self.model, before)
            tell(f"gradient checkpointing: {self.layers} of {self.total} layers, as in the run that is resumed")
        if self.layers != before:
            tell(f"gradient checkpointing: {self.layers} layers instead of {before} in the run that is resumed")
