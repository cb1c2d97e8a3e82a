"""A reference model in a separate engine: replicated, sharded over the ranks, or offloaded to host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from alignment.config.options import AlignmentConfig
from alignment.data.batching import PADDED_INPUTS, Batch, merged
from alignment.engines.collectives import device
from alignment.engines.placement import FrozenPlan
from alignment.engines.scoring import FrozenEngine, checked
from alignment.models.adapters.injection import Given, equip
from alignment.models.adapters.record import Adapters
from alignment.models.loading import disable_dropout, snapshot
from alignment.models.partitioning import mark_leaves, unmark_leaves
from alignment.models.source import ModelSource
from alignment.models.tasks import CAUSAL_LM
from alignment.references.base import RowIds
from alignment.run.ranks import world_size


class EngineReference:
    """Computes log-probs with a frozen engine. ``leaves`` are the modules returned by :func:`mark_leaves`."""

    def __init__(self, engine: FrozenEngine, leaves: list[nn.Module]) -> None:
        self.engine, self._leaves = engine, leaves

    def sequence_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        """See :class:`~alignment.references.base.Reference`."""
        return self.logps_of_each([batch], tokens=False)[0]

    def token_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        """See :class:`~alignment.references.base.Reference`."""
        return self.logps_of_each([batch], tokens=True)[0]

    @torch.no_grad()
    def logps_of_each(self, batches: Sequence[Batch], *, tokens: bool) -> list[Tensor]:
        """Return the log-probs of each of several batches, which are on the host, from a single forward pass.

        Batches with inputs that cannot be padded have a pass each. All ranks have the same inputs.
        """
        if batches[1:] and any(batch.inputs.keys() - PADDED_INPUTS for batch in batches):
            return [part for batch in batches for part in self.logps_of_each([batch], tokens=tokens)]
        output = self.engine.forward(batches[0] if len(batches) == 1 else merged(batches), tokens=tokens)
        found = output.token_logps if tokens else output.scores
        assert found is not None
        return list(found.split([len(batch.targets if tokens else batch.lengths) for batch in batches]))

    def close(self) -> None:
        """Release the engine."""
        self.engine.close()
        unmark_leaves(self._leaves)


@dataclass(frozen=True)
class ReferencePlan:
    """The plan of a reference model, made before weights are loaded. :meth:`build` does not need the policy.

    Attributes:
        source: the reference's model.
        policy: the policy's model, of which the reference is a copy unless another model was passed.
        frozen: placement and DeepSpeed configuration.
        dtype: dtype of weights and activations.
        precomputed: whether log-probs are computed before training and stored.
        adapters: the adapters that the initial policy already has.
        why: the sizes by which the placement was chosen; empty if it was requested or is the only possible one.
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
        """Whether the reference is the initial policy."""
        return self.source.live is self.policy.live and self.source.path == self.policy.path

    @property
    def copies_policy(self) -> bool:
        """Whether the reference is a live policy, which must be copied because training changes it."""
        return self.own and self.policy.live is not None

    def build(self, options: AlignmentConfig) -> EngineReference:
        """Load the model into its engine. Call this before the policy's engine is created. Collective."""
        config = self.frozen.ds_config
        if self.copies_policy:
            assert self.policy.live is not None
            # Loaded like any live model, including preparation of quantized weights.
            twin = replace(self.source, live=snapshot(self.policy.live))
            model = twin.load(options, self.dtype, config, device())
        else:
            model = self.source.load(options, self.dtype, config, device())
        scorer = CAUSAL_LM.scorer(model, False)
        if self.adapters is not None:
            equip(model, self.adapters, ds_config=config, dtype=self.dtype, seed=options.seed, keep=False)
        if options.disable_dropout:
            disable_dropout(model)
        leaves = mark_leaves(model, config)
        try:
            engine = checked(FrozenEngine(scorer, config), CAUSAL_LM, options.pack, say=not self.own)
            return EngineReference(engine, leaves)
        except BaseException:
            unmark_leaves(leaves)  # a live model still belongs to the user
            raise

    def describe(self, given: Given | None = None) -> str:
        """Describe the reference, its placement and its cost, in one line for the start of a run."""
        own = "initial policy" if self.own else self.source.name
        quantization = self.source.quantization
        kept = "" if quantization is None else f" with {quantization.describe()}"
        size = self.dtype.itemsize if quantization is None else quantization.bits / 8
        how = ", log-probs precomputed by" if self.precomputed else ","
        placed = self.frozen.placement.describe(f"{size:g}", world_size())
        return f"reference: {own}{kept}{how} {placed}{f', {self.why}' if self.why else ''}"
