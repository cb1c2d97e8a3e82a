"""A reference that is the policy itself: without its adapters, or with the frozen ones that it began with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.config.errors import OptionError
from alignment.data.batching import Batch
from alignment.engines.scoring import ScoringEngine
from alignment.internals.peft import computing_with
from alignment.models.adapters.given import Given
from alignment.models.adapters.record import Adapters
from alignment.models.checking import probe_ids
from alignment.references.base import RowIds


class AdapterReference:
    """Asks the policy's engine, and lets every layer compute as in the policy as it was given.

    Args:
        policy: the engine that learns.
        given: how the policy as given is computed with its weights.
    """

    def __init__(self, policy: ScoringEngine, given: Given) -> None:
        self.policy, self.given = policy, given

    def sequence_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        """As :class:`~alignment.references.base.Reference` says."""
        with self.policy.inference(), computing_with(self.policy.scorer, self.given.adapter):
            return self.policy.sequence_scores(batch)

    def token_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        """As :class:`~alignment.references.base.Reference` says."""
        with self.policy.inference(), computing_with(self.policy.scorer, self.given.adapter):
            return self.policy.token_logps(batch)

    def close(self) -> None:
        """Nothing to release: the engine is the policy's."""


@dataclass(frozen=True)
class AdapterReferencePlan:
    """Such a reference as it is planned.

    Attributes:
        adapters: the policy's.
    """

    adapters: Adapters

    def of(self, policy: ScoringEngine, given: Given) -> AdapterReference:
        """The reference, checked once: before training, both compute the same. Collective.

        Raises:
            OptionError: they do not.
        """
        reference = AdapterReference(policy, given)
        if self.adapters.reference is None:
            self._check(reference)
        return reference

    def _check(self, reference: AdapterReference) -> None:
        policy, model = reference.policy, reference.policy.scorer.model
        ids = probe_ids(model, 8, policy.device)
        steps = torch.arange(7, device=policy.device)
        arguments = (ids, torch.ones_like(ids), steps, ids[0, 1:], 7)
        with policy.inference():
            now = policy.scorer(*arguments).scores
            with computing_with(model, reference.given.adapter):
                given = policy.scorer(*arguments).scores
        difference = float((now - given).abs().max())
        exact = reference.given.adapter is not None  # a copy computes the same, to the bit or nearly
        rounding = 1e-6 if exact else 1e-3 if model.dtype == torch.float32 else 0.15
        if not difference <= rounding * max(1.0, float(given.abs().max())):
            raise OptionError(
                f"ref_placement: adapter: the policy's log-probs differ from the reference's by {difference:.3g} "
                "before any training, so these adapters cannot be left out; set ref_placement to offload, sharded or "
                "replica"
            )

    def describe(self, given: Given | None) -> str:
        """Whose log-probs, where they come from, and what that costs; for the line that a run begins with."""
        if self.adapters.reference is not None:
            return f"reference: the policy with its adapter {self.adapters.reference!r}, no second model"
        copied = not self.adapters.are_new if given is None else given.adapter is not None
        how = "a frozen copy of its adapters" if copied else "its adapters off"
        return f"reference: the policy as given, adapter ({how}, no second model)"
