"""Whether a frozen model fits beside what is trained, from sizes that are known before anything is loaded.

The answer has to be the same on every rank and at every start of a run, so nothing that happens to be free is
measured: the smallest card counts, and of it a part is left for what is not calculated here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from alignment.config.deepspeed_keys import value_at
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import HasLengths
from alignment.config.options_online import OnlineOptions
from alignment.engines.collectives import device, largest_numbers
from alignment.engines.memory.devices import total_bytes
from alignment.models.leaves import decoder_layers, whole_parameters
from alignment.models.logprobs import DEFAULT_TILE_BYTES
from alignment.models.source import ModelSource

_LEFT, _LEFT_BY_ROLLOUTS = 0.3, 0.4  # of a card: fragments and the unforeseen; keys and values of completions
_CONTEXT = 10**9  # bytes that CUDA, its libraries and NCCL take
_HEAD_TILES = 3  # of the head at a time, at most
_LIVE_LAYERS = 3  # of a partitioned model that are whole at a time, see stage3_max_live_parameters
# Bytes per trained parameter beside the weight itself, in the optimizer's step: AdamW with fp32 masters.
_STEP_16_BIT, _STEP_FP32 = 20, 16
_ADAPTERS = 0.02  # of a model's parameters, a generous rank
_LONGEST = 4096  # tokens of a sequence where nothing limits it


@dataclass(frozen=True)
class Census:
    """The size of a model.

    Attributes:
        parameters: all of them.
        layer: those of its largest decoder layer; 0 where the layers are not known.
        layers: number of decoder layers.
        hidden: width.
        inner: width of the MLP.
        positions: longest sequence.
    """

    parameters: int
    layer: int
    layers: int
    hidden: int
    inner: int
    positions: int


@dataclass(frozen=True)
class Use:
    """Bytes of a card, at the most: ``weights`` and states of what is trained, and ``work`` on a micro-batch."""

    weights: float
    work: float


@dataclass(frozen=True)
class Choice:
    """A placement by its name, the bytes that it takes of a card, and the sizes that speak for it."""

    placement: str
    size: float
    why: str


def census(source: ModelSource) -> Census | None:
    """Count a model's parameters, on torch's meta device if it is not loaded; None if that cannot be done."""
    model = source.live
    if model is None:
        if type(source.config) not in source.task.mapping:
            return None  # code from elsewhere is not run for this
        with torch.device("meta"):
            model = source.task.auto.from_config(source.config)
    config = source.config.get_text_config()
    layers = [whole_parameters(layer) for layer in decoder_layers(model)]
    return Census(
        parameters=whole_parameters(model),
        layer=max(layers, default=0),
        layers=len(layers),
        hidden=int(config.hidden_size),
        inner=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        positions=int(getattr(config, "max_position_embeddings", None) or _LONGEST),
    )


def use_of_policy(
    options: AlignmentConfig,
    policy: Census,
    ds_config: dict[str, Any],
    *,
    itemsize: int,
    ranks: int,
    bits: int | None = None,
    adapters: bool = False,
) -> Use:
    """What training takes of each card, as an upper bound.

    Args:
        options: the run's.
        policy: its size.
        ds_config: JSON of its engine.
        itemsize: bytes of a number in the compute dtype.
        ranks: how many there are.
        bits: of quantised base weights; None: they are kept in the compute dtype.
        adapters: only adapters are trained.
    """
    stage = int(value_at(ds_config, "zero_optimization.stage") or 0)
    offloaded = {
        name: value_at(ds_config, f"zero_optimization.offload_{name}.device") == "cpu"
        for name in ("param", "optimizer")
    }
    weights = bytes_of_parameter(itemsize, bits) * policy.parameters
    if stage == 3:
        whole = _LIVE_LAYERS * itemsize * policy.layer
        weights = whole + (0 if offloaded["param"] else weights / ranks)
    trained = policy.parameters * (_ADAPTERS if adapters else 1.0)
    step = _STEP_16_BIT if itemsize == 2 else _STEP_FP32
    if offloaded["optimizer"]:
        step = 0 if stage == 3 else itemsize  # gradients; those of stage 3 leave the card bucket by bucket
    return Use(weights + step * trained / (ranks if stage else 1), _work(options, policy, itemsize))


def bytes_of_parameter(itemsize: int, bits: int | None) -> float:
    """Of a weight in the compute dtype, or in so many ``bits`` with what these are scaled by."""
    return float(itemsize) if bits is None else bits / 8 + 0.1


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
        self.use, self.itemsize, self.ranks, self.card = use, itemsize, ranks, card
        self._left = _LEFT_BY_ROLLOUTS if isinstance(options, OnlineOptions) else _LEFT
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

    def chosen(self, frozen: Census, bits: int | None = None, *, alone: bool = False) -> Choice:
        """The same of a model of a known size: on every card, else divided over them, else in host memory."""
        others = 0.0 if alone else self.use.weights + self.use.work + self._taken
        room = (1 - self._left) * self.card - _CONTEXT - others
        whole = bytes_of_parameter(self.itemsize, bits) * frozen.parameters
        divided = whole / self.ranks + _LIVE_LAYERS * self.itemsize * frozen.layer
        sizes = {"replica": whole} | ({"sharded": divided} if self.ranks > 1 else {})
        placement = next((name for name, size in sizes.items() if size <= room), "offload")
        size = sizes.get(placement, min(sizes.values()))
        fits = "fit" if placement in sizes else "do not fit"
        why = (
            f"by size: {_gb(size)} {fits} beside up to {_gb(others)} of other use, with {self._left:.0%} of "
            f"{_gb(self.card)} left"
        )
        if not alone and placement in sizes:
            self._taken += size
        return Choice(placement, size, why)


def smallest_card() -> float | None:
    """Bytes of the smallest card of any rank, or what its process may take of it; None without GPUs. Collective."""
    here = device()
    if here.type != "cuda":
        return None
    return -largest_numbers([-float(total_bytes(here))])[0]


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
