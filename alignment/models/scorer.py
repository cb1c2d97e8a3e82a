"""The modules that an engine wraps: they map token IDs to one score per selected position, usually a log-prob.

They never return logits or a ``ModelOutput``: DeepSpeed hooks every tensor that a wrapped module returns, and a second
differentiable output silently halves ZeRO-1/2 gradients.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alignment.config.errors import ModelError, OptionError
from alignment.internals.transformers import attending_with, load_balancing_function
from alignment.models.architectures import decoder_of
from alignment.models.attention import PackingCheck
from alignment.models.head import (
    Scored,
    answers_logprobs,
    checkpointed_logprobs,
    install_logprob_head,
    logit_transform,
)
from alignment.models.logprobs import DEFAULT_TILE_BYTES, TokenStats
from alignment.models.packed_attention import PACKED


class ScorerOutput(NamedTuple):
    """The output of a scorer for N selected positions.

    Attributes:
        scores: (N,) fp32, differentiable: the log-probs of the targets, or rewards.
        aux_loss: 0-dim, differentiable; 0 for a dense model.
        stats: statistics of each position's distribution, detached; None unless requested.
    """

    scores: Tensor
    aux_loss: Tensor
    stats: TokenStats | None


class Scorer(nn.Module):
    """A model that computes one score for each selected position of token sequences."""

    balancing_loss: Callable[[tuple[Tensor, ...], Tensor | None], Tensor] | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        # Reentrant checkpointing would complete each weight's gradient once per block of rows, but ZeRO-1 and 2 reduce
        # it only once.
        self.one_pass = False
        self.whole_rows = PackingCheck()
        self._packed = False  # whether the latest forward pass with gradients was one of a packed row

    def attending(self, packed: bool | None = None) -> contextlib.AbstractContextManager[None]:
        """Wrap a forward pass without a mask, or with None the backward pass of the latest one, which may repeat it.

        Args:
            packed: whether the inputs are a packed row, see :meth:`~alignment.data.batching.Batch.packed`.
        """
        if packed is None:
            packed = self._packed
        elif torch.is_grad_enabled():
            self._packed = packed
        return attending_with(self.model, PACKED) if packed else self.whole_rows()

    @property
    def reads_mask(self) -> bool:
        """Whether :meth:`forward` uses the attention mask. If not, the mask may be missing, or on another device."""
        return True


class DecoderScorer(Scorer):
    """Base class of scorers that score a decoder's hidden states at selected positions.

    Args:
        model: the Hugging Face model.
        router_aux_loss: compute the load-balancing loss of a mixture-of-experts model.

    Raises:
        ModelError: the model has no decoder submodule.
    """

    def __init__(self, model: PreTrainedModel, router_aux_loss: bool = False) -> None:
        super().__init__(model)
        if decoder_of(model) is None:
            raise ModelError(
                f"model {type(model).__name__} ({model.config.model_type}) is not supported: it has no decoder "
                "submodule"
            )
        self.balancing_loss = balancing_loss(model) if router_aux_loss else None

    @property
    def reads_mask(self) -> bool:
        return self.balancing_loss is not None

    def forward(
        self,
        inputs: Mapping[str, Any],
        positions: Tensor,
        targets: Tensor,
        longest: int,
        stats: bool = False,
        blocks: tuple[tuple[int, int], ...] = (),
    ) -> ScorerOutput:
        """Score the hidden states at ``positions``. Log-probs are those of the tokens ``targets``.

        Args:
            inputs: keyword arguments of the model with B rows each: ``input_ids`` (B, T), padded on the right, and
                ``attention_mask`` (B, T), 1 for tokens and 0 for padding, which only a load-balancing loss uses, see
                :attr:`reads_mask`. Any others are passed on. With a ``layout``, they are those of a packed row.
            positions: (N,) int64 indices into the flattened (B*T) hidden states: for log-probs the position *before*
                each target, for rewards the position of the sequence's last token.
            targets: (N,) int64 token IDs.
            longest: largest N on any rank for this micro-batch.
            stats: whether to compute statistics of each token's distribution; ignored for rewards.
            blocks: ``(rows, width)`` of groups of consecutive rows that are passed through the model separately,
                without the padding beyond their width. Empty: all rows together, as a load-balancing loss requires.
        """
        layout = inputs.get("layout")
        whole = {} if layout is None else {"layout": layout}
        given = {name: value for name, value in inputs.items() if name not in ("attention_mask", "layout")}
        count, length = given["input_ids"].shape
        if self.balancing_loss is not None or self.one_pass or not blocks:
            blocks = ((count, length),)
        moe = {} if self.balancing_loss is None else {"output_router_logits": True}
        # Without a mask, attention takes its causal fast path. With padding on the right, no scored position attends
        # to a pad token, so the mask would not change any score; only the load-balancing loss needs it.
        decoder = decoder_of(self.model)  # not an attribute: the module would be registered under two names
        assert decoder is not None
        parts, start = [], 0
        for rows, width in blocks:
            block = {name: value[start : start + rows] for name, value in given.items()}
            block = {name: value[:, :width] if value.shape[1] == length else value for name, value in block.items()}
            start += rows
            with self.attending(layout is not None):
                outputs = decoder(**block, **whole, use_cache=False, return_dict=True, **moe)
            parts.append(nn.functional.pad(outputs.last_hidden_state, (0, 0, 0, length - width)))
        states = torch.cat(parts)
        states = states.reshape(-1, states.shape[-1]).index_select(0, positions)
        scores, measured = self._scores(states, targets, longest, stats)
        aux_loss = scores.new_zeros(())
        if self.balancing_loss is not None:
            aux_loss = self.balancing_loss(outputs.router_logits, inputs.get("attention_mask"))
        return ScorerOutput(scores, aux_loss, measured)

    @abstractmethod
    def _scores(self, states: Tensor, targets: Tensor, longest: int, stats: bool) -> Scored:
        """Map (N, H) hidden states to (N,) fp32 scores, and statistics if requested and available."""


class CompletionScorer(DecoderScorer):
    """A causal language model that returns log-probs at selected positions instead of logits.

    Args:
        model: the Hugging Face model; its head is replaced with a :class:`~alignment.models.head.LogProbHead`.
        router_aux_loss: see :class:`DecoderScorer`.
        tile_bytes: maximum size of the head's largest temporary tensor, in bytes.
    """

    def __init__(
        self, model: PreTrainedModel, router_aux_loss: bool = False, tile_bytes: int = DEFAULT_TILE_BYTES
    ) -> None:
        super().__init__(model, router_aux_loss)
        self.tile_bytes = tile_bytes
        self.transform = logit_transform(model.config.get_text_config())
        install_logprob_head(model, tile_bytes)

    def _scores(self, states: Tensor, targets: Tensor, longest: int, stats: bool) -> Scored:
        head = self.model.get_output_embeddings()
        if answers_logprobs(head):
            return head(states, targets, stats)
        return checkpointed_logprobs(head, states, targets, self.transform, self.tile_bytes, longest, stats)


def balancing_loss(model: PreTrainedModel) -> Callable[[tuple[Tensor, ...], Tensor | None], Tensor]:
    """Return the load-balancing loss of the model's modeling file, as a function of router logits and mask.

    Raises:
        OptionError: the model is not a mixture of experts with a ``load_balancing_loss_func``.
    """
    function = load_balancing_function(model)
    config = model.config.get_text_config()
    experts = next((getattr(config, n) for n in ("num_local_experts", "num_experts") if hasattr(config, n)), None)
    top_k = getattr(config, "num_experts_per_tok", None)
    if function is None or experts is None or top_k is None:
        raise OptionError(
            f"router_aux_loss_coef: {type(model).__name__} has no load-balancing loss; leave it unset or set it to 0"
        )
    return lambda router_logits, mask: function(router_logits, experts, top_k, mask)
