"""Count the memory of a pass on stand-ins with 2 and 4 layers, and extrapolate it to all layers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
from huggingface_hub.constants import HF_HOME
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from alignment.internals.transformers import attending_with
from alignment.models import logprobs
from alignment.models.adapters.record import Adapters
from alignment.models.architectures import decoder_of
from alignment.models.loading import checkpoint_first, disable_dropout, enable_checkpointing
from alignment.models.scorer import Scorer
from alignment.models.source import ModelSource
from alignment.planning.live import LiveBytes, tagged
from alignment.planning.stand_in import ATTENTION, materialize, stand_in
from alignment.run.durable import replace_text

_FEW, _MANY = 2, 4  # layers of the stand-ins
_FORMAT = 1  # to increase with every change of what is counted
_FOLDER = Path(HF_HOME) / "deepspeed-alignment" / "memory"


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
    """Counts passes of a model on fake tensors. The model is only built if a result is not in the cache on disk.

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
        self._source, self._adapters, self._dtype, self._kernel = source, adapters, dtype, kernel
        self._checkpointing, self._dropout, self._aux_loss = checkpointing, dropout, aux_loss
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        quantized = None if source.quantization is None else source.quantization.config.to_dict()
        adapted = None if adapters is None else adapters.config.to_dict()
        facts = (_FORMAT, torch.__version__, transformers.__version__, source.config.to_dict(), source.task.noun,
                 quantized, adapted, dtype, kernel, checkpointing, dropout, aux_loss)  # fmt: skip
        self._file = _FOLDER / f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.json"
        self._known = _read(self._file)

    def __call__(self, shape: Shape, *, gradients: bool, recomputed: bool = False) -> Trend:
        """Return the peak of a pass over a micro-batch, with or without gradients and recomputation of layers."""
        key = f"{tuple(shape)} {gradients} {recomputed}"
        if key not in self._known:
            for scorer in self._scorers:
                scorer.train(gradients)
                checkpoint_first(scorer.model, None if recomputed else 0)
            few, many = (self._counted(scorer, shape) for scorer in self._scorers)
            each = {tag: (many[tag] - few[tag]) / (_MANY - _FEW) for tag in {*few, *many}}
            self._known[key] = [each, {tag: few[tag] - each[tag] * _FEW for tag in each}]
            with contextlib.suppress(OSError):  # without the cache, the next run counts again
                _FOLDER.mkdir(parents=True, exist_ok=True)
                replace_text(self._file, json.dumps(self._known))
        return Trend(*self._known[key])

    @functools.cached_property
    def _scorers(self) -> list[Scorer]:
        scorers = []
        for layers in (_FEW, _MANY):
            scorer = stand_in(self._source, self._adapters, self._dtype, layers, aux_loss=self._aux_loss)
            if not self._dropout:
                disable_dropout(scorer)
            with self._fake:
                materialize(scorer)
            if scorer.model.supports_gradient_checkpointing:
                enable_checkpointing(scorer.model, self._checkpointing)
            if self._checkpointing.get("use_reentrant") and self._adapters is not None:
                scorer.model.enable_input_require_grads()
            scorers.append(scorer)
        return scorers

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


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found
