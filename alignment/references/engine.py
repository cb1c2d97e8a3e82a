"""A reference that is a model in an engine of its own: a replica, divided over the ranks, or in host memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from alignment.config.options import AlignmentConfig
from alignment.config.placement import FrozenPlan
from alignment.data.batching import Batch
from alignment.engines.collectives import device
from alignment.engines.launch_env import world_size
from alignment.engines.scoring import FrozenEngine, checked
from alignment.models.adapters.given import Given, equip
from alignment.models.adapters.record import Adapters
from alignment.models.leaves import mark_leaves, unmark_leaves
from alignment.models.loading import disable_dropout, snapshot
from alignment.models.source import ModelSource
from alignment.models.tasks import CAUSAL_LM
from alignment.references.base import RowIds


class EngineReference:
    """Computes log-probs when it is asked; row numbers are of no use to it. ``leaves``: of :func:`mark_leaves`."""

    def __init__(self, engine: FrozenEngine, leaves: list[nn.Module]) -> None:
        self.engine, self._leaves = engine, leaves

    def sequence_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        """As :class:`~alignment.references.base.Reference` says."""
        return self.engine.sequence_scores(batch)

    def token_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        """As :class:`~alignment.references.base.Reference` says."""
        return self.engine.token_logps(batch)

    def close(self) -> None:
        """Release the engine."""
        self.engine.close()
        unmark_leaves(self._leaves)


@dataclass(frozen=True)
class ReferencePlan:
    """A reference as it is planned, before anything is loaded; :meth:`build` needs no policy.

    Attributes:
        source: the reference's model.
        policy: the policy's model, which a reference that was not given is a copy of.
        frozen: placement and DeepSpeed JSON.
        dtype: of weights and activations.
        precomputed: whether the model is only asked before training, and its answers are kept.
        adapters: those that the policy as given has already.
        why: the sizes that its placement was chosen by; empty where it was asked for, or is the only one.
    """

    source: ModelSource
    policy: ModelSource
    frozen: FrozenPlan
    dtype: torch.dtype
    precomputed: bool = False
    adapters: Adapters | None = None
    why: str = ""

    @property
    def own(self) -> bool:
        """Whether it is the policy as given."""
        return self.source.live is self.policy.live and self.source.path == self.policy.path

    @property
    def copies_policy(self) -> bool:
        """Whether it is the live policy as given, which training changes."""
        return self.own and self.policy.live is not None

    def build(self, options: AlignmentConfig) -> EngineReference:
        """Load the model into its engine; a live policy is copied, so this comes before its own engine. Collective."""
        config = self.frozen.ds_config
        if self.copies_policy:
            assert self.policy.live is not None
            # Loaded like any live model, with what its weights need.
            twin = replace(self.source, live=snapshot(self.policy.live))
            model = twin.load(options, self.dtype, config, device())
        else:
            model = self.source.load(options, self.dtype, config, device())
        if options.disable_dropout:
            disable_dropout(model)
        scorer = CAUSAL_LM.scorer(model, False)
        if self.adapters is not None:
            equip(model, self.adapters, ds_config=config, dtype=self.dtype, seed=options.seed, keep=False)
        leaves = mark_leaves(model, config)
        try:
            return EngineReference(checked(FrozenEngine(scorer, config), CAUSAL_LM), leaves)
        except BaseException:
            unmark_leaves(leaves)  # of a live model, which stays the user's
            raise

    def describe(self, given: Given | None = None) -> str:
        """Whose log-probs, where they come from, and what that costs; for the line that a run begins with."""
        own = "the policy as given" if self.own else self.source.name
        quantization = self.source.quantization
        kept = "" if quantization is None else f" with {quantization.describe()}"
        size = self.dtype.itemsize if quantization is None else quantization.bits / 8
        how = ", log-probs precomputed by" if self.precomputed else ","
        placed = self.frozen.placement.describe(f"{size:g}", world_size())
        return f"reference: {own}{kept}{how} {placed}{f', {self.why}' if self.why else ''}"
