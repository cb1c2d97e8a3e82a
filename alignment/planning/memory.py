"""Estimate whether a frozen model fits in GPU memory together with training, before any weights are loaded.

The result must be the same on every rank and in every attempt, so it does not depend on the memory that happens to be
free. It is calculated for the smallest GPU, with a reserve for what is not included in the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from alignment.config.dtypes import DtypePlan, planned
from alignment.config.options import AlignmentConfig
from alignment.config.options_online import OnlineOptions
from alignment.engines.collectives import device, largest_numbers
from alignment.engines.memory import total_bytes
from alignment.engines.optimizers import step_bytes
from alignment.models.adapters.skeleton import skeleton
from alignment.models.architectures import inner_width
from alignment.models.logprobs import DEFAULT_TILE_BYTES
from alignment.models.partitioning import decoder_layers, whole_parameters
from alignment.models.source import ModelSource
from alignment.planning.gradients import Situation, least_bytes, situation_of

# Reserved share of a GPU, for fragmentation and errors of the estimate; with rollouts, also for their KV cache.
_LEFT, _LEFT_BY_ROLLOUTS = 0.3, 0.4
_CONTEXT = 10**9  # bytes that CUDA, its libraries and NCCL use
_HEAD_TILES = 3  # maximum number of tiles of the head in memory
_LIVE_LAYERS = 3  # gathered layers of a partitioned model at a time, see stage3_max_live_parameters
# Bytes per trained parameter during an optimizer step, in addition to the weights and the optimizer states: fp32
# master weights, gradients, and a flattened copy in fp32. Without ZeRO, fp32 weights are their own master weights.
_STEP, _STEP_OF_OWN_MASTERS = 12, 8
_GATHERED = 0.8  # maximum share of a GPU for weights gathered for a rollout
_LONGEST = 4096  # tokens of a sequence if nothing limits them


@dataclass(frozen=True)
class Census:
    """The size of a model.

    Attributes:
        parameters: number of parameters.
        layer: parameters of its largest decoder layer; 0 if the layers are unknown.
        layers: number of decoder layers.
        hidden: hidden size.
        inner: width of the MLP; for a mixture of experts, of all experts that a token is routed to.
        positions: maximum sequence length.
        linear: parameters that can be quantized: not embeddings, the head, or experts that are not linear layers.
        widest: parameters of the largest tensor outside the layers, which ZeRO-3 fetches in one piece.
    """

    parameters: int
    layer: int
    layers: int
    hidden: int
    inner: int
    positions: int
    linear: int = 0
    widest: int = 0


@dataclass(frozen=True)
class Use:
    """Upper bounds of the memory in use on a GPU, in bytes.

    Attributes:
        weights: weights, gradients and optimizer states of the policy.
        work: activations of a micro-batch.
        gathered: full weights gathered for a rollout; 0 if they are not sharded or not gathered.
        loading: full weights while the policy is loaded; 0 if they are partitioned while they are read.
    """

    weights: float
    work: float
    gathered: float = 0.0
    loading: float = 0.0


@dataclass(frozen=True)
class Choice:
    """The name of a placement, the bytes that it takes on a GPU, and the reason for choosing it."""

    placement: str
    size: float
    why: str


def census(source: ModelSource) -> Census | None:
    """Count a model's parameters on torch's meta device; return None if that is not possible.

    A model object is counted according to its configuration, because 4-bit weights have other shapes.
    """
    if source.live is None and type(source.config) not in source.task.mapping:
        return None  # do not run remote code for this
    try:
        model = skeleton(source, trust_remote_code=False)
    except Exception:  # the problem, such as a missing package, is reported when the model is loaded
        return None
    config = source.config.get_text_config()
    layers = decoder_layers(model)
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    head = model.get_output_embeddings()
    linear = (module for module in model.modules() if isinstance(module, nn.Linear) and module is not head)
    positions = int(getattr(config, "max_position_embeddings", None) or 0)
    return Census(
        parameters=whole_parameters(model),
        layer=max(map(whole_parameters, layers), default=0),
        layers=len(layers),
        hidden=int(config.hidden_size),
        inner=_inner(config),
        positions=positions if positions > 0 else _LONGEST,
        linear=sum(parameter.numel() for parameter in {module.weight for module in linear}),
        widest=max((p.numel() for p in model.parameters() if p not in inside), default=0),
    )


def _inner(config: PretrainedConfig) -> int:
    experts = int(getattr(config, "num_experts_per_tok", None) or 1)
    dense = inner_width(config)
    return max(dense, experts * int(getattr(config, "moe_intermediate_size", None) or dense))


def use_of_policy(
    options: AlignmentConfig,
    policy: Census,
    ds_config: dict[str, Any],
    dtypes: DtypePlan,
    *,
    ranks: int,
    bits: int | None = None,
    trained: int | None = None,
    longest: int | None = None,
) -> Use:
    """Return an upper bound of the memory that training uses on each GPU.

    Args:
        options: options of the run.
        policy: size of the policy.
        ds_config: JSON of its engine.
        dtypes: dtypes of the run.
        ranks: number of ranks.
        bits: bits of quantized base weights; None if they are in the compute dtype.
        trained: number of adapter parameters; None if the full model is trained.
        longest: tokens of the longest sequence; None if the rows are unknown.
    """
    at = situation_of(ds_config, ranks, micro_batches=1, checkpointing=bool(options.gradient_checkpointing))
    itemsize: int = getattr(torch, dtypes.compute).itemsize
    own = policy.parameters if trained is None else trained
    weights = bytes_of(policy, itemsize, bits) + (0 if trained is None else itemsize * trained)
    loading, gathered = loading_bytes(policy, itemsize, bits, partitioned=at.stage == 3), 0.0
    if at.stage == 3:
        if isinstance(options, OnlineOptions) and options.ds3_gather_for_generation is not False:
            gathered = weights
        weights = _live(policy, itemsize) + (0 if at.weights_offloaded else weights / ranks)
    weights += _step(own, dtypes, at, step_bytes(options))
    return Use(weights, _work(options, policy, itemsize, longest), gathered, loading)


def _step(trained: int, dtypes: DtypePlan, at: Situation, states: float) -> float:
    """Return the bytes of optimizer states, of a lower bound of the gradients, and of the optimizer step."""
    gradients = least_bytes(trained, dtypes, at)
    if at.offloaded:
        return gradients
    if at.stage == 0:
        return (states + (_STEP_OF_OWN_MASTERS if dtypes.compute == "float32" else _STEP)) * trained
    share = trained / at.ranks
    # At stage 1, full gradients exist in addition to the partition of the step.
    return (_STEP + states) * share + (gradients if at.stage == 1 and at.ranks > 1 else 0)


def bytes_of(model: Census, itemsize: int, bits: int | None) -> float:
    """Return the bytes of the weights, with those of linear layers quantized to ``bits`` (plus scales) unless None."""
    packed = 0 if bits is None else model.linear
    return itemsize * (model.parameters - packed) + (0.0 if bits is None else (bits / 8 + 0.1) * packed)


def loading_bytes(model: Census, itemsize: int, bits: int | None, *, partitioned: bool) -> float:
    """Return the bytes on each GPU while a model is loaded: all of it, and a layer that is cast, merged or quantized.

    Only weights that are not quantized are partitioned while they are read.
    """
    if partitioned and bits is None:
        return 0.0
    return bytes_of(model, itemsize, bits) + itemsize * max(model.layer, model.widest)


def _live(model: Census, itemsize: int) -> float:
    """Return the bytes of a sharded model that are gathered at a time."""
    return float(itemsize * (_LIVE_LAYERS * model.layer + model.widest))


def _work(options: AlignmentConfig, policy: Census, itemsize: int, longest: int | None) -> float:
    """Return the bytes of activations and head tiles of two sequences per row: a pair, or a row and its mismatch."""
    if longest is None:
        limit = getattr(options, "max_length", None)
        longest = min(limit or _LONGEST, policy.positions)
    tokens = 2 * options.per_device_train_batch_size * longest
    layer = (29 + 8 * policy.inner / policy.hidden) * policy.hidden * itemsize / 2
    kept = 2 * policy.hidden * itemsize / 2 if options.gradient_checkpointing else layer
    return tokens * (kept * policy.layers + layer) + _HEAD_TILES * DEFAULT_TILE_BYTES


class Cards:
    """The GPUs of a run, on which frozen models are placed one after another.

    Args:
        options: options of the run.
        use: memory that training uses on a GPU.
        itemsize: bytes per element in the compute dtype.
        ranks: number of ranks.
        card: bytes of the smallest GPU.
    """

    def __init__(self, options: AlignmentConfig, use: Use, itemsize: int, ranks: int, card: float) -> None:
        self.itemsize, self.ranks, self.card = itemsize, ranks, card
        self._left = _LEFT_BY_ROLLOUTS if isinstance(options, OnlineOptions) else _LEFT
        # Rollouts and micro-batches alternate; weights that do not fit are never gathered.
        fits = use.gathered <= _GATHERED * (card - _CONTEXT)
        self._trained = max(use.weights + max(use.work, use.gathered if fits else 0.0), use.loading)
        self._taken = 0.0  # bytes of the models placed so far

    def place(self, source: ModelSource, bits: int | None = None, *, alone: bool = False) -> Choice | None:
        """Return the fastest placement that fits, or None for a model of unknown size.

        Args:
            source: the model.
            bits: bits of its weights; None if they are in the compute dtype.
            alone: whether the model is released before training starts.
        """
        frozen = census(source)
        return None if frozen is None else self.chosen(frozen, bits, alone=alone)

    def take(self, source: ModelSource, bits: int | None, placement: str) -> None:
        """Account for a model whose placement the user has set."""
        frozen = census(source)
        if frozen is not None:
            self._taken += self._sizes(frozen, bits)[placement]

    def chosen(self, frozen: Census, bits: int | None = None, *, alone: bool = False) -> Choice:
        """Return the fastest placement for a model of this size: replicated, else sharded, else in host memory."""
        others = 0.0 if alone else self._trained + self._taken
        room = (1 - self._left) * self.card - _CONTEXT - others
        sizes = self._sizes(frozen, bits)
        on_cards = ["replica", *(["sharded"] if self.ranks > 1 else [])]
        placement = next((name for name in on_cards if sizes[name] <= room), "offload")
        fits = "fit" if placement in on_cards else "do not fit"
        size = sizes[placement] if placement in on_cards else min(sizes[name] for name in on_cards)
        why = (
            f"by size: {_gb(size)} {fits} in addition to {_gb(others)} of other use, with {self._left:.0%} of "
            f"{_gb(self.card)} in reserve"
        )
        if not alone:
            self._taken += sizes[placement]
        return Choice(placement, size, why)

    def _sizes(self, frozen: Census, bits: int | None) -> dict[str, float]:
        """Return the bytes that a model takes on each GPU, by placement."""
        whole, live = bytes_of(frozen, self.itemsize, bits), _live(frozen, self.itemsize)
        return {"replica": whole, "sharded": whole / self.ranks + live, "offload": live}


def smallest_card() -> float | None:
    """Return the bytes of the smallest GPU that a process can use; None without GPUs. Collective.

    None also if the run is planned for another machine, whose GPUs are unknown.
    """
    here = device()
    if here.type != "cuda" or planned() is not None:
        return None
    return -largest_numbers([-float(total_bytes(here))])[0]


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
