"""Replace a model's language modeling head in place with one that can return log-probs.

:class:`LogProbHead` has the name, the Parameter (tied or not) and the behavior of the ``nn.Linear`` that it replaces,
so ``generate`` and ``save_pretrained`` work unchanged. When called with targets, it returns per-token log-probs. It
must be *called as a module*, because ZeRO-3 gathers and releases weights in module hooks. A head that is not a plain
``nn.Linear`` (a 4-bit layer, an adapter, a custom module) is not replaced; :func:`checkpointed_logprobs` handles it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from alignment.config.errors import ModelError
from alignment.models.logprobs import DEFAULT_TILE_BYTES, LogitTransform, LogProbHead, Scored, TokenStats, tile_length

# Names of the configuration values that multiply, divide and cap the logits.
_FACTORS = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def logit_transform(config: PretrainedConfig) -> LogitTransform:
    """Return the scale and the soft cap that the model applies after its head, as read from its configuration.

    Soft caps: ``final_logit_softcapping`` (Gemma 2 and later), ``logits_soft_cap`` (RecurrentGemma),
    ``output_logit_soft_cap`` (xLSTM). Scales: Cohere multiplies by ``logit_scale`` and Falcon-H1 by
    ``lm_head_multiplier``; Granite divides by ``logits_scaling``, but HyperCLOVA X multiplies by it; Inkling divides
    the hidden states, and therefore the logits, by ``logits_mup_width_multiplier``. MPT has a ``logit_scale`` that its
    forward pass does not use. ``models.checking.check_scorer`` rejects models with any other transform.
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
    """Replace a plain linear head with a :class:`LogProbHead`, and return the model's head.

    Raises:
        ModelError: The model has no language modeling head.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(
            f"model {type(model).__name__} has no language modeling head; load it with "
            "AutoModelForCausalLM.from_pretrained"
        )
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
    """Replace the original and every trainable copy of a head that is in PEFT's ``modules_to_save``.

    Returns:
        Whether ``module`` is such a wrapper; if not, nothing is replaced.
    """
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return False
    setattr(module, "original_module", replaced(getattr(module, "original_module")))  # noqa: B009, B010
    for name in copies:
        copies[name] = replaced(copies[name])
    return True


def answers_logprobs(head: nn.Module) -> bool:
    """Return whether a head is a :class:`LogProbHead`, or PEFT's trainable copy of one."""
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
    """Compute log-probs with any other head: in chunks of tokens that are recomputed in the backward pass.

    Args:
        head: Maps (C, H) to raw logits (C, V).
        hidden: (N, H) hidden states.
        targets: (N,) int64 token IDs.
        transform: Scale and soft cap of the logits.
        tile_bytes: Maximum size of a chunk of logits, in bytes.
        longest: Largest N on any rank for this micro-batch. All ranks must call the head the same number of times:
            under ZeRO-3, a rank with fewer calls would leave the others waiting in an all-gather.
        stats: Whether to compute statistics of each token's distribution.

    Returns:
        (N,) fp32 log-probs, and the statistics or None.
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
