"""The model's language-modelling head, replaced in place by one that can answer with log-probs.

:class:`LogProbHead` keeps the name, the Parameter (tied or not) and the behaviour of the ``nn.Linear`` it replaces, so
``generate`` and ``save_pretrained`` do not notice. Called with targets, it returns per-token log-probs. It is *called
as a module*, which is what makes ZeRO-3 gather and release its weight. A head that is no plain ``nn.Linear`` (a 4-bit
layer, an adapter, something of the model's own) is left as it is and scored by :func:`checkpointed_logprobs`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from alignment.config.errors import ModelError
from alignment.models.logprobs import DEFAULT_TILE_BYTES, LogitTransform, TokenStats, tile_length, token_logprobs

Scored = tuple[Tensor, TokenStats | None]


class LogProbHead(nn.Linear):
    """A linear head: ``forward(h)`` gives logits, ``forward(h, targets)`` log-probs in fp32 (see :mod:`.logprobs`)."""

    transform: LogitTransform
    tile_bytes: int

    @classmethod
    def replacing(cls, linear: nn.Linear, transform: LogitTransform, tile_bytes: int) -> LogProbHead:
        """A head around the very Parameters of ``linear``; nothing is copied, partitioned parameters stay so."""
        head = cls(1, 1, bias=False, device="meta")
        head.in_features, head.out_features = linear.in_features, linear.out_features
        head.weight, head.bias = linear.weight, linear.bias
        head.transform, head.tile_bytes = transform, tile_bytes
        return head.train(linear.training)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, targets: Tensor | None = None, stats: bool = False
    ) -> Tensor | Scored:
        """(..., H) -> raw logits (..., V); with ``targets`` (N,), hidden (N, H) -> log-probs (N,) and statistics."""
        if targets is None:
            return super().forward(hidden)
        return token_logprobs(hidden, self.weight, self.bias, targets, self.transform, self.tile_bytes, stats)


# By what names configurations multiply, divide and cap logits.
_FACTORS = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def logit_transform(config: PretrainedConfig) -> LogitTransform:
    """Scale and soft cap that the model's own forward applies after its head, read from its configuration.

    Caps: ``final_logit_softcapping`` (Gemma 2 and later), ``logits_soft_cap`` (RecurrentGemma),
    ``output_logit_soft_cap`` (xLSTM). Cohere multiplies by ``logit_scale``, Falcon-H1 by ``lm_head_multiplier``;
    Granite divides by ``logits_scaling``, by which HyperCLOVA X multiplies; Inkling divides the hidden states, and so
    the logits, by ``logits_mup_width_multiplier``. MPT has a ``logit_scale`` that its forward does not read. A model
    with another rule is found out, and refused, by ``models.checking.check_scorer``.
    """
    own = config.model_type
    scale = 1.0
    for name in _FACTORS if own != "mpt" else ():
        scale *= getattr(config, name, None) or 1.0
    for name in _DIVISORS:
        value = getattr(config, name, None) or 1.0
        scale *= value if own == "hyperclovax" else 1 / value
    caps = (getattr(config, name, None) for name in _CAPS)
    return LogitTransform(float(scale), next((float(cap) for cap in caps if cap is not None), None))


def install_logprob_head(model: PreTrainedModel, tile_bytes: int = DEFAULT_TILE_BYTES) -> nn.Module:
    """Put a :class:`LogProbHead` where the model has a plain linear head; return the head that is now there.

    Raises:
        ModelError: the model has no language-modelling head.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"model {type(model).__name__} has no language-modelling head: load it as a causal LM")
    transform = logit_transform(model.config.get_text_config())

    def replaced(linear: nn.Module) -> nn.Module:
        plain = type(linear) is nn.Linear or isinstance(linear, LogProbHead)
        return LogProbHead.replacing(linear, transform, tile_bytes) if plain else linear  # type: ignore[arg-type]

    if replace_copies(head, replaced):
        return head
    head = replaced(head)
    model.set_output_embeddings(head)
    return head


def replace_copies(module: nn.Module, replaced: Callable[[nn.Module], nn.Module]) -> bool:
    """Replace the original and each trained copy of a head that PEFT keeps whole (``modules_to_save``).

    Returns:
        False where the module is no such wrapper, and nothing was done.
    """
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return False
    setattr(module, "original_module", replaced(getattr(module, "original_module")))  # noqa: B009, B010
    for name in copies:
        copies[name] = replaced(copies[name])
    return True


def answers_logprobs(head: nn.Module) -> bool:
    """Whether a head is a :class:`LogProbHead`, or a copy of one that PEFT trains in its place."""
    return isinstance(getattr(head, "original_module", head), LogProbHead)


def checkpointed_logprobs(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    tile_bytes: int,
    longest: int,
    stats: bool = False,
) -> Scored:
    """The fallback for any other head: token chunks, each recomputed in the backward pass.

    Args:
        head: maps (C, H) to raw logits (C, V).
        hidden: (N, H).
        targets: (N,) int64.
        transform: scale and soft cap of the logits.
        tile_bytes: budget of one chunk of logits.
        longest: the largest N of any rank for this micro-batch. Every rank calls the head equally often; under ZeRO-3
            a rank with fewer calls would leave the others waiting in an all-gather.
        stats: measure each token's distribution as well.

    Returns:
        (N,) fp32 log-probs; and the statistics, or None.
    """
    width = int(getattr(head, "out_features", 0)) or 65536
    step = tile_length(longest, width, tile_bytes)

    def score(chunk: Tensor, wanted: Tensor) -> tuple[Tensor, ...]:
        logits = head(chunk)
        logits = transform.apply(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        logps = logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(1)
        return (logps, *TokenStats.of_logits(logits, wanted)) if stats else (logps,)

    parts = [
        checkpoint(score, hidden[start : start + step], targets[start : start + step], use_reentrant=False)
        for start in range(0, max(longest, 1), step)
    ]
    logps, *measured = (torch.cat(columns) for columns in zip(*parts))
    return logps, TokenStats(*measured) if stats else None
