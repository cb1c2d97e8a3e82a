"""Count the memory of a pass on stand-ins with 2 and 4 layers, and extrapolate it to all layers."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from alignment.internals.transformers import attending_with
from alignment.models.adapters.record import Adapters
from alignment.models.architectures import decoder_of
from alignment.models import logprobs
from alignment.models.loading import disable_dropout, enable_checkpointing
from alignment.models.scorer import Scorer
from alignment.models.source import ModelSource
from alignment.planning.live import LiveBytes, tagged
from alignment.planning.stand_in import ATTENTION, materialize, stand_in

_FEW, _MANY = 2, 4  # layers of the stand-ins


class Shape(NamedTuple):
    """A micro-batch.

    Attributes:
        sequences: number of sequences.
        width: tokens of each.
        scored: number of scored positions in all.
    """

    sequences: int
    width: int
    scored: int


@dataclass(frozen=True)
class Trend:
    """The bytes of a pass, by tag, as linear functions of the number of layers: one per layer, and a constant."""

    each: dict[str, float]
    fixed: dict[str, float]

    def of(self, layers: int) -> dict[str, float]:
        """Return the bytes with this many layers, by tag."""
        return {tag: self.fixed[tag] + self.each[tag] * layers for tag in self.each}


class Counting:
    """Counts passes of a model on fake tensors.

    Args:
        source: the model, with its quantization.
        adapters: the adapters to train, or None.
        dtype: compute dtype.
        kernel: the attention kernel, see :data:`~alignment.planning.stand_in.KERNELS`.
        checkpointing: arguments of gradient checkpointing.
        dropout: whether dropout is active.
        aux_loss: whether a load-balancing loss is computed.
    """

    def __init__(
        self,
        source: ModelSource,
        adapters: Adapters | None,
        dtype: torch.dtype,
        kernel: str,
        *,
        checkpointing: dict[str, Any],
        dropout: bool = False,
        aux_loss: bool = False,
    ) -> None:
        self._kernel, self._checkpointing = kernel, checkpointing
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._scorers = []
        for layers in (_FEW, _MANY):
            scorer = stand_in(source, adapters, dtype, layers, aux_loss=aux_loss)
            if not dropout:
                disable_dropout(scorer)
            with self._fake:
                materialize(scorer)
            if checkpointing.get("use_reentrant") and adapters is not None:
                scorer.model.enable_input_require_grads()
            self._scorers.append(scorer)

    def __call__(self, shape: Shape, *, gradients: bool, recomputed: bool = False) -> Trend:
        """Return the peak of a pass over a micro-batch, with or without gradients and recomputation of layers."""
        for scorer in self._scorers:
            scorer.train(gradients)
            if recomputed:
                enable_checkpointing(scorer.model, self._checkpointing)
            elif scorer.model.is_gradient_checkpointing:
                scorer.model.gradient_checkpointing_disable()
        few, many = (self._counted(scorer, shape) for scorer in self._scorers)
        each = {tag: (many[tag] - few[tag]) / (_MANY - _FEW) for tag in {*few, *many}}
        return Trend(each, {tag: few[tag] - each[tag] * _FEW for tag in each})

    def _counted(self, scorer: Scorer, shape: Shape) -> Counter[str]:
        """Gradients of weights are released as soon as they are complete, as at ZeRO stages 2 and 3."""
        with self._fake, _tagging(scorer), LiveBytes([*scorer.parameters(), *scorer.buffers()]) as live:
            ids = torch.zeros((shape.sequences, shape.width), dtype=torch.long)
            positions = torch.arange(shape.scored)
            targets = torch.zeros(shape.scored, dtype=torch.long)
            inputs = {"input_ids": ids}
            if scorer.reads_mask:
                inputs["attention_mask"] = torch.ones_like(ids)
            with (
                torch.set_grad_enabled(scorer.training),
                attending_with(scorer.model, ATTENTION + self._kernel),
                mock.patch.object(logprobs, "tile_starts", lambda count, step: range(min(count, 1))),
            ):
                with tagged("head"):
                    output = scorer(inputs, positions, targets, shape.scored, True)
                if scorer.training:
                    (output.scores.sum() + output.aux_loss).backward()
            return live.at_peak


@contextlib.contextmanager
def _tagging(scorer: Scorer) -> Iterator[None]:
    """Tag what the decoder creates in its forward pass with ``layers``, and release gradients of weights."""
    decoder = decoder_of(scorer.model)
    assert isinstance(decoder, nn.Module)
    inside = contextlib.ExitStack()

    def enter(*_: Any) -> None:
        inside.enter_context(tagged("layers"))

    hooks = [decoder.register_forward_pre_hook(enter), decoder.register_forward_hook(lambda *_: inside.close())]
    trained = (parameter for parameter in scorer.parameters() if parameter.requires_grad)
    hooks += [parameter.register_post_accumulate_grad_hook(_release) for parameter in trained]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _release(parameter: Tensor) -> None:
    parameter.grad = None
