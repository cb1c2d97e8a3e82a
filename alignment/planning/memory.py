"""Whether a frozen model fits beside what is trained, from sizes that are known before anything is loaded.

The answer has to be the same on every rank and at every start of a run, so nothing that happens to be free is
measured: the smallest card counts, and of it a part is left for what is not calculated here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from alignment.config.dtypes import DtypePlan, planned
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import HasLengths
from alignment.config.options_online import OnlineOptions
from alignment.engines.collectives import device, largest_numbers
from alignment.engines.memory.devices import total_bytes
from alignment.engines.optimizers import step_bytes
from alignment.models.adapters.skeleton import skeleton
from alignment.models.architectures import inner_width
from alignment.models.leaves import decoder_layers, whole_parameters
from alignment.models.logprobs import DEFAULT_TILE_BYTES
from alignment.models.source import ModelSource
from alignment.planning.gradients import Situation, least_bytes, situation_of

_LEFT, _LEFT_BY_ROLLOUTS = 0.3, 0.4  # of a card: fragments and the unforeseen; keys and values of completions
_CONTEXT = 10**9  # bytes that CUDA, its libraries and NCCL take
_HEAD_TILES = 3  # of the head at a time, at most
_LIVE_LAYERS = 3  # of a partitioned model that are whole at a time, see stage3_max_live_parameters
# Bytes per trained parameter beside the weight itself and the optimizer's states in a step, gradients among them: fp32
# masters, a flattened copy in fp32. Without ZeRO weights in fp32 are their own masters.
_STEP, _STEP_OF_OWN_MASTERS = 12, 8
_GATHERED = 0.8  # of a card that the weights gathered for a rollout may take
_LONGEST = 4096  # tokens of a sequence where nothing limits it


@dataclass(frozen=True)
class Census:
    """The size of a model.

    Attributes:
        parameters: all of them.
        layer: those of its largest decoder layer; 0 where the layers are not known.
        layers: number of decoder layers.
        hidden: width.
        inner: width of the MLP; of a mixture of experts, of all experts that a token goes to.
        positions: longest sequence.
        linear: parameters that are kept in 4 or 8 bits if any are: neither embeddings, nor the head, nor experts that
            are no linear layers.
        widest: those of the largest tensor outside of the layers, which ZeRO-3 fetches in one piece.
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
    """Bytes of a card, at the most.

    Attributes:
        weights: and states of what is trained.
        work: on a micro-batch.
        gathered: whole weights of a rollout, if they are divided otherwise and may be gathered.
    """

    weights: float
    work: float
    gathered: float = 0.0


@dataclass(frozen=True)
class Choice:
    """A placement by its name, the bytes that it takes of a card, and the sizes that speak for it."""

    placement: str
    size: float
    why: str


def census(source: ModelSource) -> Census | None:
    """Count a model's parameters, on torch's meta device; None if that cannot be done.

    A live model is counted as its configuration has it: weights in 4 bits have other shapes than the model.
    """
    if source.live is None and type(source.config) not in source.task.mapping:
        return None  # code from elsewhere is not run for this
    try:
        model = skeleton(source, trust_remote_code=False)
    except Exception:  # what is wrong, such as a package that is missing, is said when the model is loaded
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
) -> Use:
    """What training takes of each card, as an upper bound.

    Args:
        options: the run's.
        policy: its size.
        ds_config: JSON of its engine.
        dtypes: the run's.
        ranks: how many there are.
        bits: of quantised base weights; None: they are kept in the compute dtype.
        trained: parameters of adapters; None: all of the model's are.
    """
    at = situation_of(ds_config, ranks, micro_batches=1, checkpointing=bool(options.gradient_checkpointing))
    itemsize: int = getattr(torch, dtypes.compute).itemsize
    own = policy.parameters if trained is None else trained
    weights = bytes_of(policy, itemsize, bits) + (0 if trained is None else itemsize * trained)
    gathered = 0.0
    if at.stage == 3:
        if isinstance(options, OnlineOptions) and options.ds3_gather_for_generation is not False:
            gathered = weights
        weights = _live(policy, itemsize) + (0 if at.weights_offloaded else weights / ranks)
    return Use(weights + _step(own, dtypes, at, step_bytes(options)), _work(options, policy, itemsize), gathered)


def _step(trained: int, dtypes: DtypePlan, at: Situation, states: float) -> float:
    """States, and gradients however little may be kept of them, with what the optimizer's step takes besides."""
    gradients = least_bytes(trained, dtypes, at)
    if at.offloaded:
        return gradients
    if at.stage == 0:
        return (states + (_STEP_OF_OWN_MASTERS if dtypes.compute == "float32" else _STEP)) * trained
    share = trained / at.ranks
    # At stage 1 whole gradients are there beside the partition that the step works on.
    return (_STEP + states) * share + (gradients if at.stage == 1 and at.ranks > 1 else 0)


def bytes_of(model: Census, itemsize: int, bits: int | None) -> float:
    """Of weights in the compute dtype, or those of linear layers in so many ``bits`` with what these are scaled by."""
    packed = 0 if bits is None else model.linear
    return itemsize * (model.parameters - packed) + (0.0 if bits is None else (bits / 8 + 0.1) * packed)


def _live(model: Census, itemsize: int) -> float:
    """What of a divided model is whole at a time."""
    return float(itemsize * (_LIVE_LAYERS * model.layer + model.widest))


def _work(options: AlignmentConfig, policy: Census, itemsize: int) -> float:
    """Activations and the head's tiles: of chosen and rejected answers, or of prompts with a partner's completion."""
    longest = min(options.max_length or _LONGEST if isinstance(options, HasLengths) else _LONGEST, policy.positions)
    tokens = 2 * options.per_device_train_batch_size * longest
    layer = (29 + 8 * policy.inner / policy.hidden) * policy.hidden * itemsize / 2
    kept = 2 * policy.hidden * itemsize / 2 if options.gradient_checkpointing else layer
    return tokens * (kept * policy.layers + layer) + _HEAD_TILES * DEFAULT_TILE_BYTES


class Cards:
    """The GPUs of a run, and where frozen models go beside what is trained, one after another.

    Args:
        options: the run's.
        use: of a card by what is trained.
        itemsize: bytes of a number in the compute dtype.
        ranks: how many there are.
        card: bytes of the smallest card.
    """

    def __init__(self, options: AlignmentConfig, use: Use, itemsize: int, ranks: int, card: float) -> None:
        self.itemsize, self.ranks, self.card = itemsize, ranks, card
        self._left = _LEFT_BY_ROLLOUTS if isinstance(options, OnlineOptions) else _LEFT
        # A rollout and the work on a micro-batch take turns; whole weights that do not fit are never gathered.
        fits = use.gathered <= _GATHERED * (card - _CONTEXT)
        self._trained = use.weights + max(use.work, use.gathered if fits else 0.0)
        self._taken = 0.0  # by those that were placed

    def place(self, source: ModelSource, bits: int | None = None, *, alone: bool = False) -> Choice | None:
        """The fastest placement that fits; None for a model whose size is not known.

        Args:
            source: the model.
            bits: of its weights; None: they are kept in the compute dtype.
            alone: it is released before anything is trained.
        """
        frozen = census(source)
        return None if frozen is None else self.chosen(frozen, bits, alone=alone)

    def take(self, source: ModelSource, bits: int | None, placement: str) -> None:
        """Count a model that the user has placed, so that those placed after it find it there."""
        frozen = census(source)
        if frozen is not None:
            self._taken += self._sizes(frozen, bits)[placement]

    def chosen(self, frozen: Census, bits: int | None = None, *, alone: bool = False) -> Choice:
        """The same of a model of a known size: on every card, else divided over them, else in host memory."""
        others = 0.0 if alone else self._trained + self._taken
        room = (1 - self._left) * self.card - _CONTEXT - others
        sizes = self._sizes(frozen, bits)
        on_cards = ["replica", *(["sharded"] if self.ranks > 1 else [])]
        placement = next((name for name in on_cards if sizes[name] <= room), "offload")
        fits = "fit" if placement in on_cards else "do not fit"
        size = sizes[placement] if placement in on_cards else min(sizes[name] for name in on_cards)
        why = (
            f"by size: {_gb(size)} {fits} beside up to {_gb(others)} of other use, with {self._left:.0%} of "
            f"{_gb(self.card)} left"
        )
        if not alone:
            self._taken += sizes[placement]
        return Choice(placement, size, why)

    def _sizes(self, frozen: Census, bits: int | None) -> dict[str, float]:
        """Bytes that a model takes of each card, by its placement."""
        whole, live = bytes_of(frozen, self.itemsize, bits), _live(frozen, self.itemsize)
        return {"replica": whole, "sharded": whole / self.ranks + live, "offload": live}


def smallest_card() -> float | None:
    """Bytes of the smallest card of any rank, or what its process may take of it; None without GPUs. Collective.

    None also where the run is planned for another machine, whose cards nobody can look at.
    """
    here = device()
    if here.type != "cuda" or planned() is not None:
        return None
    return -largest_numbers([-float(total_bytes(here))])[0]


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
