"""Count the memory of a pass on stand-ins with 2 and 4 layers, and extrapolate it to all layers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.constants import HF_HOME
from torch import Tensor, nn

from alignment.internals.transformers import attending_with, chosen_attention, deciding_on_packing, experts_with
from alignment.models import experts
from alignment.models.adapters.record import Adapters
from alignment.models.architectures import decoder_of
from alignment.models.first_part import only_first_part
from alignment.models.loading import checkpoint_first, disable_dropout, enable_checkpointing
from alignment.models.packed_attention import flash_attn_varlen_func
from alignment.models.partitioning import decoder_layers
from alignment.models.scorer import Scorer
from alignment.models.source import ModelSource
from alignment.planning.live import LiveBytes, live_bytes, tagged
from alignment.planning.stand_in import attention_of, grouped_product, stand_in
from alignment.run.durable import replace_text
from alignment.run.ranks import rank

_FEW, _MANY = 2, 4  # layers of the stand-ins
_FORMAT = 5  # to increase with every change of what is counted
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
    """Bytes by tag as linear functions of the number of layers: those of each layer, and a constant."""

    each: dict[str, float]
    fixed: dict[str, float]

    @classmethod
    def through(cls, few: Mapping[str, float], many: Mapping[str, float]) -> Trend:
        """Return the line through what was counted on both stand-ins."""
        each = {tag: (many.get(tag, 0) - few.get(tag, 0)) / (_MANY - _FEW) for tag in {*few, *many}}
        return cls(each, {tag: few.get(tag, 0) - each[tag] * _FEW for tag in each})

    def of(self, layers: int) -> dict[str, float]:
        """Return the bytes with this many layers, by tag."""
        return {tag: self.fixed[tag] + self.each[tag] * layers for tag in self.each}


class Counting:
    """Counts passes of a model on meta tensors. The model is only built if a result is not in the cache on disk.

    Args:
        source: the model, with its quantization.
        adapters: the adapters to train, or None.
        dtype: compute dtype.
        kernel: the attention kernel, see :data:`~alignment.planning.stand_in.KERNELS`.
        rows: how sequences are laid out, see :data:`~alignment.planning.stand_in.ROWS`.
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
        rows: str = "padded",
        dropout: bool = False,
        aux_loss: bool = False,
    ) -> None:
        self._source, self._adapters, self._dtype, self._kernel = source, adapters, dtype, kernel
        self._checkpointing, self._rows = checkpointing, rows
        self._dropout, self._aux_loss = dropout, aux_loss
        quantized = None if source.quantization is None else source.quantization.content()
        adapted = None if adapters is None else adapters.config.to_dict()
        facts = (_FORMAT, torch.__version__, transformers.__version__, source.config.to_dict(), source.task.noun,
                 chosen_attention(source.config), flash_attn_varlen_func is None, quantized, adapted, dtype, kernel,
                 rows, checkpointing, dropout, aux_loss, source.mlp, experts.EXPERT_BYTES)  # fmt: skip
        self._file = _FOLDER / f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.json"
        self._known = _read(self._file)

    def __call__(
        self, shape: Shape, *, gradients: bool, recomputed: bool = False, kept: float = 0.0, stats: bool = True
    ) -> tuple[Trend, Trend]:
        """Return the peak of a pass over a micro-batch, and its peak since the backward pass of the first layer began.

        Args:
            shape: the micro-batch.
            gradients: whether there is a backward pass; without one, the peaks are those of decoder and head.
            recomputed: whether layers are recomputed in the backward pass.
            stats: whether statistics of the distributions are computed.
            kept: share of the gradients of weights that stay until the end; the others are freed as soon as they are
                complete.
        """
        key = f"{tuple(shape)} {gradients} {recomputed} {kept} {stats}"
        if key not in self._known:
            for scorer in self._scorers:
                scorer.train(gradients)
                checkpoint_first(scorer.model, None if recomputed else 0)
            few, many = (self._counted(scorer, shape, kept, stats) for scorer in self._scorers)
            self._known[key] = [asdict(Trend.through(*parts)) for parts in zip(few, many)]
            if rank() == 0:
                with contextlib.suppress(OSError):  # without the cache, the next run counts again
                    _FOLDER.mkdir(parents=True, exist_ok=True)
                    replace_text(self._file, json.dumps(self._known))
        first, last = (Trend(**each) for each in self._known[key])
        return first, last

    @functools.cached_property
    def _scorers(self) -> list[Scorer]:
        scorers = []
        for layers in (_FEW, _MANY):
            scorer = stand_in(self._source, self._adapters, self._dtype, layers, aux_loss=self._aux_loss)
            if not self._dropout:
                disable_dropout(scorer)
            if scorer.model.supports_gradient_checkpointing:
                enable_checkpointing(scorer.model, self._checkpointing)
            if self._checkpointing.get("use_reentrant") and self._adapters is not None:
                scorer.model.enable_input_require_grads()
            scorers.append(scorer)
        return scorers

    def _counted(self, scorer: Scorer, shape: Shape, kept: float, stats: bool) -> tuple[Counter[str], Counter[str]]:
        with (
            torch.device("meta"),
            live_bytes([*scorer.parameters(), *scorer.buffers()]) as live,
            _watched(scorer, live, kept),
        ):
            ids = torch.zeros((shape.sequences, shape.width), dtype=torch.long)
            positions = torch.arange(shape.scored)
            targets = torch.zeros(shape.scored, dtype=torch.long)
            inputs = {"input_ids": ids}
            if scorer.reads_mask:
                inputs["attention_mask"] = torch.ones_like(ids)
            with (
                torch.set_grad_enabled(scorer.training),
                attending_with(scorer.model, attention_of(scorer.model, self._kernel, self._rows)),
                only_first_part(),
                experts_with(grouped_product),
                deciding_on_packing(lambda *_: None, lambda: True),  # positions have no values
            ):
                with tagged("head"):
                    output = scorer(inputs, positions, targets, shape.scored, stats)
                if scorer.training:
                    (output.scores.sum() + output.aux_loss).backward()
            return live.at_peak if live.before is None else live.before, live.at_peak


@contextlib.contextmanager
def _watched(scorer: Scorer, live: LiveBytes, kept: float) -> Iterator[None]:
    """Tag what the decoder creates in its forward pass, find its last part, and free or keep gradients of weights."""
    decoder, layers = decoder_of(scorer.model), decoder_layers(scorer.model)
    assert isinstance(decoder, nn.Module)
    inside = contextlib.ExitStack()

    def enter(*_: Any) -> None:
        inside.enter_context(tagged("layers"))

    def after_first(layer: nn.Module, inputs: Any, output: Any) -> None:
        states = output if isinstance(output, Tensor) else output[0]
        if states.requires_grad:
            states.register_hook(lambda gradient: live.begin_last_part())

    def release(parameter: Tensor) -> None:
        assert parameter.grad is not None
        size, parameter.grad = parameter.grad.untyped_storage().nbytes(), None
        live.keep("gradients", int(kept * size))

    hooks = [decoder.register_forward_pre_hook(enter), decoder.register_forward_hook(lambda *_: inside.close())]
    if not scorer.training:
        hooks.append(decoder.register_forward_hook(lambda *_: live.begin_last_part()))
    hooks += [layer.register_forward_hook(after_first) for layer in layers[:1]]
    trained = (parameter for parameter in scorer.parameters() if parameter.requires_grad)
    hooks += [parameter.register_post_accumulate_grad_hook(release) for parameter in trained]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found
