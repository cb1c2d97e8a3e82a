"""A run whose memory is planned: its configuration, and what is counted of its models."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from alignment.config.dtypes import DtypePlan
from alignment.config.errors import first_line
from alignment.config.fields import keywords
from alignment.config.options import AlignmentConfig
from alignment.models.adapters.record import Adapters
from alignment.models.packed_attention import configured_refusal
from alignment.models.source import ModelSource
from alignment.planning.activations import Counting, Shape, Trend
from alignment.planning.plan import Frozen, NotPlanned
from alignment.planning.weights import Weights, weights_of
from alignment.references.adapter import AdapterReferencePlan
from alignment.references.engine import ReferencePlan


class Engines(Protocol):
    """The parts of an :class:`~alignment.planning.engines.EnginePlan` that memory depends on."""

    @property
    def dtypes(self) -> DtypePlan: ...

    @property
    def compute(self) -> torch.dtype: ...

    @property
    def source(self) -> ModelSource: ...

    @property
    def policy(self) -> dict[str, Any]: ...

    @property
    def adapters(self) -> Adapters | None: ...

    @property
    def reference(self) -> ReferencePlan | AdapterReferencePlan | None: ...


@dataclass
class PlannedRun:
    """What the memory of a run depends on, and the counted passes of its models.

    Args:
        options: options of the run.
        engines: its engine plan.
        ranks: number of ranks, each with a GPU.
        sequences: sequences of a row that are trained on: 2 for pairs.
        referenced: sequences of a row that the reference scores.
        hosts: number of hosts.
        rewards: its reward models.
        kernel: attention kernel, see :data:`~alignment.planning.stand_in.KERNELS`.
        aux_loss: whether a load-balancing loss is computed.
        card: bytes of the smallest GPU, in which gradients are accumulated in the first way that fits; by default, all
            do.
    """

    options: AlignmentConfig
    engines: Engines
    ranks: int
    sequences: int = 2
    referenced: int = 2
    hosts: int = 1
    rewards: tuple[Frozen, ...] = ()
    kernel: str = "flash"
    aux_loss: bool = False
    card: float = math.inf
    # By the id of the model, which is kept so that the id stays unique.
    _countings: dict[int, tuple[ModelSource, Counting]] = field(default_factory=dict)
    _weights: dict[int, tuple[ModelSource, Weights | None]] = field(default_factory=dict)

    @functools.cached_property
    def weights(self) -> Weights | None:
        """The weights of the policy."""
        plan = self.engines
        return weights_of(plan.source, plan.compute, plan.adapters, trained=True)

    @property
    def frozen(self) -> tuple[Frozen, ...]:
        """The models that only compute scores."""
        plan = self.engines.reference
        if not isinstance(plan, ReferencePlan):
            return self.rewards
        reference = Frozen("reference", plan.source, plan.frozen.placement.name, "reference", alone=plan.precomputed)
        return (reference, *self.rewards)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the options and the model allow."""
        return int(getattr(self.options, "max_length", None) or 0) or self.positions or 4096

    @property
    def positions(self) -> int:
        """The model's maximum sequence length; 0 if its configuration does not limit it."""
        return int(getattr(self.engines.source.config.get_text_config(), "max_position_embeddings", 0) or 0)

    def activations(self, source: ModelSource, shape: Shape, **how: Any) -> tuple[Trend, Trend]:
        """Return the peaks of a pass of the policy, or of a frozen model; see :class:`Counting`."""
        try:
            return self._counting(source)(shape, **how)
        except Exception as error:  # of many classes, from the model's own code
            why = f"{source.name} cannot be computed on tensors without values: {first_line(error)}"
            raise NotPlanned(why) from error

    def _rows(self, source: ModelSource) -> str:
        """Return how the sequences of a model are laid out, see :class:`Counting`."""
        if self.options.pack == "false" or configured_refusal(source.config) is not None:
            return "padded"
        return "shared" if source is self.engines.source and self.sequences > 1 and not self.aux_loss else "packed"

    def weights_of(self, source: ModelSource) -> Weights | None:
        """Return the weights of a frozen model."""
        if id(source) not in self._weights:
            self._weights[id(source)] = source, weights_of(source, self.engines.compute)
        return self._weights[id(source)][1]

    def _counting(self, source: ModelSource) -> Counting:
        """Return the stand-ins of a model, which are kept for further shapes."""
        if id(source) not in self._countings:
            options, policy = self.options, source is self.engines.source
            arguments = {"use_reentrant": False} | dict(keywords(options.gradient_checkpointing_kwargs))
            made = Counting(
                source,
                self.engines.adapters if policy else None,
                self.engines.compute,
                self.kernel,
                checkpointing=arguments,
                rows=self._rows(source),
                dropout=not options.disable_dropout,
                aux_loss=self.aux_loss and policy,
            )
            self._countings[id(source)] = source, made
        return self._countings[id(source)][1]
