"""A scorer compared with its model's own forward on a few tokens, once, before anything is trained.

This finds the architecture whose logits are not ``head(hidden)`` up to the scale and cap that we know of, and the one
that sees the tokens which follow. Both are compared with the size of the logits: an absolute tolerance would let a
missing soft cap pass wherever logits are small.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alignment.config.errors import AlignmentError, ModelError
from alignment.models.scorer import CompletionScorer, Scorer

_TOKENS, _SHARED = 8, 5  # of each of two rows; how many of them begin both
_FP32_ROUNDING = 1e-6  # of a log-softmax, in parts of its result
_WIDE = {torch.float32, torch.float64}


@torch.no_grad()
def check_scorer(scorer: CompletionScorer, device: torch.device) -> None:
    """Compare the scorer's log-probs with those of the model's own logits, and logits before and after another end.

    Two rows begin alike. At each position three tokens are scored: the next one, the likeliest and the least likely,
    whose logits a cap changes most. Both sides compute the same hidden states from the same batch, so that they differ
    by the rounding of the head alone.

    Raises:
        ModelError: they differ by more than rounding, the model is not causal, or cannot be called in this way.
    """
    model = scorer.model
    probe = probe_ids(model, 2 * _TOKENS - _SHARED, device)[0]
    ids = torch.stack([probe[:_TOKENS], torch.cat([probe[:_SHARED], probe[_TOKENS:]])])
    try:
        with without_dropout(scorer):
            # The scorer before the model: in a pass through what the engine wraps ZeRO-3 finds the weights that one
            # module reads of another, as DoRA does, and fetches them from then on.
            steps = torch.arange(ids.numel(), device=device).view_as(ids)[:, :-1].flatten()
            targets = ids[:, 1:].flatten()
            ours = scorer(ids, torch.ones_like(ids), steps, targets, len(steps)).scores
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
            extremes = torch.cat([logits.argmax(-1), logits.argmin(-1)])
            further = scorer(ids, torch.ones_like(ids), steps.repeat(2), extremes, len(extremes)).scores
            targets, ours = torch.cat([targets, extremes]), torch.cat([ours, further])
    except AlignmentError:  # a ValueError too, that says what is wrong itself
        raise
    except (TypeError, ValueError, AttributeError) as error:
        named = f"model {type(model).__name__} ({model.config.model_type})"
        raise ModelError(f"{named} cannot be scored: {type(error).__name__}: {error}") from error
    wide = logits.to(ours.dtype)
    in_16_bits = not {model.dtype, logits.dtype} <= _WIDE  # xLSTM widens logits that its head rounded
    theirs = wide.log_softmax(-1).repeat(3, 1).gather(1, targets[:, None])[:, 0]
    size = float(wide.abs().max())
    # Log-probs round by their own size as well: logits may all be 0, and their log-sum-exp is not.
    least = _FP32_ROUNDING * float(theirs.abs().max())
    check_agreement(model, "logits", ours, theirs, _head_rounding(in_16_bits, device) * size + least)
    first, second = wide.unflatten(0, (2, -1))[:, :_SHARED]
    # The median over positions: in 16 bits a router may send single tokens elsewhere because of rounding.
    change = float((first - second).abs().amax(-1).median())
    if change > (5e-2 if in_16_bits else 3e-4) * size + least:
        raise ModelError(
            f"model {type(model).__name__} ({model.config.model_type}) is not causal: logits change by {change:.3g} "
            "with the tokens that follow; if its config.json has is_decoder or causal, set it to true"
        )


def _head_rounding(in_16_bits: bool, device: torch.device) -> float:
    """What rounding may change of logits from the same hidden states, in parts of the largest one.

    In bfloat16 a product, a scale and each of the three operations of a cap round to 1/512, and so does the
    log-sum-exp of the result; products of fp32 in TF32 round to 1/2048.
    """
    if in_16_bits:
        return 3e-2
    return 5e-3 if device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32 else 1e-4


def probe_ids(model: PreTrainedModel, length: int, device: torch.device) -> Tensor:
    """(1, length) int64: tokens from all over the vocabulary."""
    vocabulary = model.config.get_text_config().vocab_size
    return (torch.arange(1, length + 1, device=device) * 7919 % vocabulary)[None]


@contextlib.contextmanager
def without_dropout(scorer: Scorer) -> Iterator[None]:
    """Evaluation mode; the mode from before comes back on any exit."""
    training = scorer.training
    scorer.eval()
    try:
        yield
    finally:
        scorer.train(training)


def check_agreement(model: PreTrainedModel, what: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Compare what a scorer and its model make of the same tokens.

    Args:
        model: for messages.
        what: is compared.
        ours: (N,) the scorer's.
        theirs: (N,) the model's.
        tolerance: how far apart rounding may put them, in their own unit.

    Raises:
        ModelError: they differ by more than rounding.
    """
    difference = float((ours - theirs).abs().max())
    if not math.isfinite(difference):
        raise ModelError(
            f"model {type(model).__name__}: its {what} are not finite, so its weights are broken or too large for its "
            "dtype; start from another checkpoint, or set dtype: float32"
        )
    if difference > tolerance:
        raise ModelError(
            f"model {type(model).__name__} ({model.config.model_type}) computes its {what} in a way that this project "
            f"does not know: its own differ from ours by {difference:.3g}; please report the architecture"
        )
