"""What a method needs in a run beside policy and reference: nothing, unless it says so."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from alignment.trainers.context import RunContext
from alignment.trainers.data_setup import PreparedData
from alignment.trainers.method import Models
from alignment.trainers.window import WindowPass


class Companion:
    """Takes part in planning, building and releasing the engines of a run; a method's trainer may have its own.

    Attributes:
        metrics: the names of what is measured beside the method's.
    """

    metrics: tuple[str, ...] = ()

    def check_data(self, data: PreparedData) -> None:
        """Refuse a dataset that cannot be used, before anything is loaded."""

    def build(self) -> list[str]:
        """Load what is needed, before policy and reference; lines for the start of the run. Collective."""
        return []

    def window_pass(self, context: RunContext, models: Models, aux_coefficient: float | None) -> WindowPass:
        """The computation of windows with these models."""
        return WindowPass(context.method, models, context.phases, aux_coefficient)

    def built(self, model: PreTrainedModel) -> None:
        """Called with the policy's model once its engine is there."""

    def settings(self) -> dict[str, Any]:
        """What it was resolved to, by the names of files in the output folder."""
        return {}

    def close(self) -> None:
        """Release what :meth:`build` loaded."""
