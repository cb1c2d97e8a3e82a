"""Compare a scorer with its model's own forward pass on a few tokens, once, before training starts.

This detects architectures whose logits are not ``head(hidden)`` up to a known scale and soft cap, and architectures
that are not causal. Tolerances are relative to the magnitude of the logits: with an absolute tolerance, a missing soft
cap would go unnoticed if the logits are small.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alignment.config.errors import AlignmentError, ModelError, first_line
from alignment.data.batching import collate
from alignment.internals.transformers import requested_attention
from alignment.models.packed_attention import CannotPack, configured_refusal, recorded_windows
from alignment.models.scorer import CompletionScorer, DecoderScorer, Scorer

_TOKENS, _SHARED = 8, 5  # tokens in each of the two rows; length of their common prefix
_FP32_ROUNDING = 1e-6  # relative rounding error of a log-softmax
_LONGEST_WINDOW = 256  # a longer sliding window has no test sequence that exceeds it
_WIDE = {torch.float32, torch.float64}


@torch.no_grad()
def check_scorer(scorer: CompletionScorer, device: torch.device) -> None:
    """Compare the scorer's log-probs with those of the model's logits, and the logits of a prefix with two endings.

    The two rows have a common prefix. At each position three tokens are scored: the next token, the most likely and
    the least likely one, because a soft cap changes extreme logits most. Both sides compute the same hidden states
    from the same batch, so that only the rounding of the head differs.

    Raises:
        ModelError: The log-probs differ by more than rounding, the model is not causal, or it has another signature.
    """
    model = scorer.model
    probe = probe_ids(model, 2 * _TOKENS - _SHARED, device)[0]
    ids = torch.stack([probe[:_TOKENS], torch.cat([probe[:_SHARED], probe[_TOKENS:]])])
    try:
        with without_dropout(scorer):
            # Run the scorer before the model: ZeRO-3 traces the wrapped module on its first forward pass and learns
            # which modules read the weights of other modules (as DoRA does), so that it fetches them in later passes.
            steps = torch.arange(ids.numel(), device=device).view_as(ids)[:, :-1].flatten()
            targets = ids[:, 1:].flatten()
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            ours = scorer(inputs, steps, targets, len(steps)).scores
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
            extremes = torch.cat([logits.argmax(-1), logits.argmin(-1)])
            further = scorer(inputs, steps.repeat(2), extremes, len(extremes)).scores
            targets, ours = torch.cat([targets, extremes]), torch.cat([ours, further])
    except AlignmentError:  # also a ValueError, but with a message for the user
        raise
    except (TypeError, ValueError, AttributeError) as error:
        named = f"model {type(model).__name__} ({model.config.model_type})"
        raise ModelError(f"{named}: the test forward pass failed: {type(error).__name__}: {error}") from error
    wide = logits.to(ours.dtype)
    in_16_bits = not {model.dtype, logits.dtype} <= _WIDE  # xLSTM upcasts logits already rounded
    theirs = wide.log_softmax(-1).repeat(3, 1).gather(1, targets[:, None])[:, 0]
    size = float(wide.abs().max())
    # Log-probs also have a rounding error relative to themselves: all logits may be 0, but their log-sum-exp is not.
    least = _FP32_ROUNDING * float(theirs.abs().max())
    check_agreement(model, "logits", ours, theirs, _head_rounding(in_16_bits, device) * size + least)
    first, second = wide.unflatten(0, (2, -1))[:, :_SHARED]
    # Median over positions: in 16 bits, rounding may change the expert to which a router sends individual tokens.
    change = float((first - second).abs().amax(-1).median())
    if change > (5e-2 if in_16_bits else 3e-4) * size + least:
        raise ModelError(
            f"model {type(model).__name__} ({model.config.model_type}) is not causal: its logits change by "
            f"{change:.3g} when later tokens change; if its config.json has is_decoder or causal, set it to true"
        )


def _head_rounding(in_16_bits: bool, device: torch.device) -> float:
    """Return the tolerance for logits computed from the same hidden states, relative to the largest logit.

    In bfloat16, the product, the scale, each of the three operations of a soft cap and the log-sum-exp of the result
    have a relative rounding error of 1/512. fp32 products on a GPU may be in TF32, with one of 1/2048; torch has
    several settings for it, and reading one raises an error after another has been set.
    """
    if in_16_bits:
        return 3e-2
    return 5e-3 if device.type == "cuda" else 1e-4


def probe_ids(model: PreTrainedModel, length: int, device: torch.device) -> Tensor:
    """Return (1, length) int64 token IDs spread over the whole vocabulary."""
    vocabulary = model.config.get_text_config().vocab_size
    return (torch.arange(1, length + 1, device=device) * 7919 % vocabulary)[None]


def why_not_packed(scorer: Scorer, device: torch.device) -> str | None:
    """Return why a model does not score the sequences of a packed row as it scores each of them; None if it does.

    Two sequences share a prefix, and a third one is longer than the sliding window. One of more than
    ``_LONGEST_WINDOW`` tokens would make that expensive; there, the layers have to pass on its size.
    """
    model = scorer.model
    config = model.config.get_text_config()
    if not isinstance(scorer, DecoderScorer):
        return "it is not a decoder"
    if (given := requested_attention(model)) is not None:
        return f"attn_implementation is {given}"
    if (reason := configured_refusal(config)) is not None:
        return reason
    window = getattr(config, "sliding_window", None) or 0
    length = _TOKENS + max(_TOKENS, window if window <= _LONGEST_WINDOW else 0)
    length = min(length, getattr(config, "max_position_embeddings", None) or length)
    probe = probe_ids(model, length + 2 * _TOKENS, device)[0].tolist()
    sequences = [probe[:length], probe[-_TOKENS:], probe[-_TOKENS:-_SHARED] + probe[: _TOKENS - _SHARED]]
    try:
        with torch.no_grad(), without_dropout(scorer), recorded_windows() as windows:
            alone = [_scores(scorer, [each], [], device) for each in sequences]
            ours = _scores(scorer, sequences, [(1, 2)], device)
    except CannotPack as error:
        return str(error)
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and type(error) is not RuntimeError:
            raise  # out of memory, a lost rank, a device error
        return f"its forward pass fails: {type(error).__name__}: {first_line(error)}"
    theirs, layers = torch.cat(alone), getattr(config, "layer_types", None)
    sliding = layers.count("sliding_attention") if layers else config.num_hidden_layers if window else 0
    if len(windows) < config.num_hidden_layers:
        return f"{config.num_hidden_layers - len(windows)} of its layers have an attention of their own"
    if window > _LONGEST_WINDOW and windows.count(window) < sliding:
        return "its sliding window is part of the mask only"
    difference, size = (ours - theirs).abs(), float(theirs.abs().max())
    in_16_bits = model.dtype not in _WIDE  # rounding may change the expert to which a router sends individual tokens
    found = float(difference.median() if in_16_bits else difference.max())
    if not found <= _head_rounding(in_16_bits, device) * size:
        return f"scores differ by {found:.3g} from those of the sequences on their own"
    return None


def _scores(scorer: Scorer, sequences: list[list[int]], groups: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """Score all tokens of sequences but the first of each; a single one is not packed."""
    batch = collate([(each[:1], each[1:]) for each in sequences], sum(map(len, sequences)), groups=groups)
    batch = (batch.packed() if groups else batch).to(device)
    return scorer(batch.inputs, batch.positions, batch.targets, batch.longest).scores


@contextlib.contextmanager
def without_dropout(scorer: Scorer) -> Iterator[None]:
    """Switch to evaluation mode within the context and restore the previous mode on any exit."""
    training = scorer.training
    scorer.eval()
    try:
        yield
    finally:
        scorer.train(training)


def check_agreement(model: PreTrainedModel, what: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Compare the results of a scorer and of its model for the same tokens.

    Args:
        model: The model, for messages.
        what: What is compared, for messages: "logits" or "score".
        ours: (N,) results of the scorer.
        theirs: (N,) results of the model.
        tolerance: Largest absolute difference that rounding explains.

    Raises:
        ModelError: The results differ by more than ``tolerance`` or are not finite.
    """
    difference = float((ours - theirs).abs().max())
    if not math.isfinite(difference):
        raise ModelError(
            f"model {type(model).__name__}: its {what} contain NaN or infinite values, so its weights are corrupted "
            "or overflow in its dtype; use another checkpoint, or set dtype: float32"
        )
    if difference > tolerance:
        raise ModelError(
            f"model {type(model).__name__} ({model.config.model_type}) computes its {what} in an unsupported way: "
            f"recomputed values differ by {difference:.3g}; please report the architecture in an issue"
        )
