"""A reference that is a model in an engine of its own: a replica, divided over the ranks, or in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.config.options import AlignmentConfig
from alignment.config.placement import FrozenPlan
from alignment.data.batching import Batch
from alignment.engines.launch_env import world_size
from alignment.engines.scoring import FrozenEngine, frozen_engine
from alignment.models.loading import disable_dropout, snapshot
from alignment.models.source import ModelSource, widened
from alignment.references.base import RowIds


class EngineReference:
    """Computes log-probs when it is asked; row numbers are of no use to it."""

    def __init__(self, engine: FrozenEngine) -> None:
        self.engine = engine

    def sequence_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        """As :class:`~alignment.references.base.Reference` says."""
        return self.engine.sequence_scores(batch)

    def token_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        """As :class:`~alignment.references.base.Reference` says."""
        return self.engine.token_logps(batch)

    def close(self) -> None:
        """Release the engine."""
        self.engine.close()


@dataclass(frozen=True)
class ReferencePlan:
    """A reference as it is planned, before anything is loaded; :meth:`build` needs no policy.

    Attributes:
        source: the reference's model.
        policy: the policy's model, which a reference that was not given is a copy of.
        frozen: placement and DeepSpeed JSON.
        dtype: of weights and activations.
        precomputed: whether the model is only asked before training, and its answers are kept.
        adapters: what stands for the content of the adapters that it has; None for none.
        quantisation: what stands for the format of quantised weights; None for none.
    """

    source: ModelSource
    policy: ModelSource
    frozen: FrozenPlan
    dtype: torch.dtype
    precomputed: bool = False
    adapters: str | None = None
    quantisation: str | None = None

    @property
    def copies_policy(self) -> bool:
        """Whether it is the live policy as given, which training changes."""
        return self.source is self.policy and self.policy.live is not None

    def build(self, options: AlignmentConfig) -> EngineReference:
        """Load the model into its engine; a live policy is copied, so this comes before its own engine. Collective."""
        if self.copies_policy:
            assert self.policy.live is not None
            model = widened(snapshot(self.policy.live), self.dtype)
        else:
            model = self.source.load(options, self.dtype, self.frozen.ds_config)
        if options.disable_dropout:
            disable_dropout(model)
        return EngineReference(frozen_engine(model, self.frozen.ds_config))

    def describe(self) -> str:
        """Whose log-probs, where they come from, and what that costs; for the line that a run begins with."""
        own = "the policy as given" if self.source is self.policy else self.source.name
        own += ", log-probs precomputed by" if self.precomputed else ","
        return f"reference: {own} {self.frozen.placement.describe(self.dtype.itemsize, world_size())}"
