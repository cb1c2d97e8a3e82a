"""The module that an engine wraps: token ids in, one number for each chosen position out, mostly its log-prob.

It never returns logits or a ``ModelOutput``: DeepSpeed hooks every tensor that a wrapped module returns, and a second
output with a graph halves ZeRO-1/2 gradients without a word.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alignment.config.errors import ModelError, OptionError
from alignment.internals.transformers import load_balancing_function
from alignment.models.architectures import decoder_of
from alignment.models.head import (
    Scored,
    answers_logprobs,
    checkpointed_logprobs,
    install_logprob_head,
    logit_transform,
)
from alignment.models.logprobs import DEFAULT_TILE_BYTES, TokenStats
from alignment.models.packing import PackingCheck


class ScorerOutput(NamedTuple):
    """What a scorer makes of N chosen positions.

    Attributes:
        scores: (N,) fp32, with graph: the log-probs of the targets, or rewards.
        aux_loss: 0-dim, with graph; 0 for a dense model.
        stats: of each position's distribution, without graph; None unless asked for.
    """

    scores: Tensor
    aux_loss: Tensor
    stats: TokenStats | None


class Scorer(nn.Module):
    """A model that scores chosen positions of token sequences, one number for each."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        # Re-entrant checkpointing would finish each weight's gradient once per pass, and ZeRO-1 and 2 take only one.
        self.one_pass = False
        self.packing = PackingCheck()

    @property
    def reads_mask(self) -> bool:
        """Whether :meth:`forward` reads the attention mask; where it does not, None may take its place."""
        return True


class DecoderScorer(Scorer):
    """A decoder whose hidden states at chosen positions are scored; a subclass says how.

    Args:
        model: the Hugging Face model.
        router_aux_loss: compute the load-balancing loss of a mixture-of-experts model.

    Raises:
        ModelError: the model has no part that gives hidden states.
    """

    def __init__(self, model: PreTrainedModel, router_aux_loss: bool = False) -> None:
        super().__init__(model)
        if decoder_of(model) is None:
            raise ModelError(f"model {type(model).__name__} ({model.config.model_type}) has no decoder of its own")
        self.balancing_loss = balancing_loss(model) if router_aux_loss else None

    @property
    def reads_mask(self) -> bool:
        return self.balancing_loss is not None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        positions: Tensor,
        targets: Tensor,
        longest: int,
        stats: bool = False,
        blocks: tuple[tuple[int, int], ...] = (),
    ) -> ScorerOutput:
        """Score the hidden states at ``positions``; log-probs are those of the tokens ``targets``.

        Args:
            input_ids: (B, T) int64, padded on the right.
            attention_mask: (B, T) int64, 1 on real tokens; only a balancing loss reads it, see :attr:`reads_mask`.
            positions: (N,) int64 into the flattened (B*T) hidden states: for log-probs the position *before* each
                target, for a reward that of the sequence's last token.
            targets: (N,) int64 token ids.
            longest: the largest N of any rank for this micro-batch.
            stats: measure each token's distribution as well, where there is one.
            blocks: ``(rows, width)`` of consecutive rows that go through the model on their own, without the padding
                right of their width; none: all rows at once, as a balancing loss needs them.
        """
        if self.balancing_loss is not None or self.one_pass or not blocks:
            blocks = ((input_ids.shape[0], input_ids.shape[1]),)
        moe = {} if self.balancing_loss is None else {"output_router_logits": True}
        # Without a mask attention takes its causal fast path. With padding on the right nothing that is scored can see
        # a pad, so the mask would change no number; only the balancing loss needs to know which tokens are real.
        decoder = decoder_of(self.model)  # not kept: it would be a module of two names
        assert decoder is not None
        parts = []
        for rows, (_, width) in zip(input_ids.split([count for count, _ in blocks]), blocks):
            with self.packing():
                outputs = decoder(input_ids=rows[:, :width], use_cache=False, return_dict=True, **moe)
            parts.append(nn.functional.pad(outputs.last_hidden_state, (0, 0, 0, input_ids.shape[1] - width)))
        states = torch.cat(parts)
        states = states.reshape(-1, states.shape[-1]).index_select(0, positions)
        scores, measured = self._scores(states, targets, longest, stats)
        aux_loss = scores.new_zeros(())
        if self.balancing_loss is not None:
            assert attention_mask is not None
            aux_loss = self.balancing_loss(outputs.router_logits, attention_mask)
        return ScorerOutput(scores, aux_loss, measured)

    @abstractmethod
    def _scores(self, states: Tensor, targets: Tensor, longest: int, stats: bool) -> Scored:
        """(N, H) hidden states -> (N,) scores in fp32, and statistics if asked for and there are any."""


class CompletionScorer(DecoderScorer):
    """A causal language model that scores chosen positions instead of returning logits.

    Args:
        model: the Hugging Face model; its head is replaced by a :class:`~alignment.models.head.LogProbHead`.
        router_aux_loss: as for :class:`DecoderScorer`.
        tile_bytes: budget of the head's largest temporary.
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


def balancing_loss(model: PreTrainedModel) -> Callable[[tuple[Tensor, ...], Tensor], Tensor]:
    """The load-balancing loss that the model's own modelling file defines, as a function of router logits and mask.

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
