"""A reference computed with the policy's engine: with the adapters disabled, or with a frozen copy of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.config.errors import OptionError
from alignment.data.batching import Batch
from alignment.engines.scoring import ScoringEngine
from alignment.internals.peft import computing_with
from alignment.models.adapters.injection import Given
from alignment.models.adapters.record import Adapters
from alignment.models.checking import probe_ids
from alignment.references.base import RowIds


class AdapterReference:
    """Computes log-probs of the initial policy with the policy's engine.

    Args:
        policy: the policy's engine.
        given: how the initial policy is computed with the policy's weights.
    """

    def __init__(self, policy: ScoringEngine, given: Given) -> None:
        self.policy, self.given = policy, given

    def sequence_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        """See :class:`~alignment.references.base.Reference`."""
        with self.policy.inference(), computing_with(self.policy.scorer, self.given.adapter):
            return self.policy.forward(batch).scores

    def token_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        """See :class:`~alignment.references.base.Reference`."""
        with self.policy.inference(), computing_with(self.policy.scorer, self.given.adapter):
            logps = self.policy.forward(batch, tokens=True).token_logps
        assert logps is not None
        return logps

    def close(self) -> None:
        """Do nothing: the engine belongs to the policy."""


@dataclass(frozen=True)
class AdapterReferencePlan:
    """The plan of an adapter reference.

    Attributes:
        adapters: the policy's adapters.
    """

    adapters: Adapters

    def of(self, policy: ScoringEngine, given: Given) -> AdapterReference:
        """Create the reference and check that it equals the policy before training. Collective.

        Raises:
            OptionError: the log-probs differ.
        """
        reference = AdapterReference(policy, given)
        if self.adapters.reference is None:
            self._check(reference)
        return reference

    def _check(self, reference: AdapterReference) -> None:
        policy, model = reference.policy, reference.policy.scorer.model
        ids = probe_ids(model, 8, policy.device)
        steps = torch.arange(7, device=policy.device)
        arguments = ({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, steps, ids[0, 1:], 7)
        with policy.inference():
            now = policy.scorer(*arguments).scores
            with computing_with(model, reference.given.adapter):
                given = policy.scorer(*arguments).scores
        difference = float((now - given).abs().max())
        exact = reference.given.adapter is not None  # a copy computes (almost) bitwise identical results
        rounding = 1e-6 if exact else 1e-3 if model.dtype == torch.float32 else 0.15
        if not difference <= rounding * max(1.0, float(given.abs().max())):
            raise OptionError(
                f"ref_placement: adapter: the log-probs of policy and reference differ by {difference:.3g} before "
                "training, so the initial policy cannot be computed without these adapters; set ref_placement to "
                "offload, sharded or replica"
            )

    def describe(self, given: Given | None) -> str:
        """Describe the reference, its placement and its cost, in one line for the start of a run."""
        if self.adapters.reference is not None:
            return f"reference: the policy with its adapter {self.adapters.reference!r}, no second model"
        copied = not self.adapters.are_new if given is None else given.adapter is not None
        how = "a frozen copy of its adapters" if copied else "adapters disabled"
        return f"reference: initial policy, adapter ({how}, no second model)"
