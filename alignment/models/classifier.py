"""Scorers for sequence classifiers: one reward per sequence, the logit of the only label or of the first of two.

A decoder's score is computed from the hidden state of the sequence's last token, whose position is part of the batch.
The forward pass of transformers instead looks for the last token that is not the pad token, and misses the
end-of-sequence token if it is also the pad token. Other classifiers (BERT, DeBERTa …) are scored by their own forward
pass and cannot be trained.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from alignment.config.errors import ModelError
from alignment.models.architectures import decoder_of
from alignment.models.checking import check_agreement, probe_ids, without_dropout
from alignment.models.head import Scored, replace_copies
from alignment.models.scorer import DecoderScorer, Scorer, ScorerOutput

HEAD = "score"  # the name of the head in every decoder-based sequence classifier of transformers

HEAD_TENSORS = (f"{HEAD}.weight", f"{HEAD}.base_layer.weight")  # names of its weight, without and with an adapter


class RewardHead(nn.Linear):
    """A linear head that always computes in fp32. In bf16, rewards that differ by 1/256 would be ties."""

    @classmethod
    def replacing(cls, linear: nn.Linear) -> RewardHead:
        """Create a head that shares the Parameters of ``linear``, which may be partitioned."""
        head = cls(1, 1, bias=False, device="meta")
        head.in_features, head.out_features = linear.in_features, linear.out_features
        head.weight, head.bias = linear.weight, linear.bias
        return head.train(linear.training)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., H) -> (..., 1), at least fp32."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        return F.linear(hidden.to(wide), self.weight.to(wide), bias)


def linear_head(model: PreTrainedModel) -> nn.Linear | None:
    """Return the linear classification head without its PEFT wrappers, or None if the model has no linear head."""
    head = getattr(model, HEAD, None)
    for wrapped in ("original_module", "base_layer"):
        head = getattr(head, wrapped, head)
    return head if isinstance(head, nn.Linear) else None


def reads_last_token(model: PreTrainedModel) -> bool:
    """Return whether the model is a decoder with a linear head on the hidden state of the last token."""
    return linear_head(model) is not None and decoder_of(model) is not None


class RewardScorer(DecoderScorer):
    """Scores the hidden states of a decoder at ``positions``, the last token of each sequence.

    Args:
        model: A sequence classifier with one label. Its head is replaced with a :class:`RewardHead`.
        router_aux_loss: See :class:`~alignment.models.scorer.DecoderScorer`.
    """

    def __init__(self, model: PreTrainedModel, router_aux_loss: bool = False) -> None:
        super().__init__(model, router_aux_loss)
        head = getattr(model, HEAD)
        if hasattr(head, "base_layer"):  # it has an adapter
            head.base_layer = RewardHead.replacing(head.base_layer)
        elif not replace_copies(head, RewardHead.replacing):  # type: ignore[arg-type]
            setattr(model, HEAD, RewardHead.replacing(head))

    def _scores(self, states: Tensor, targets: Tensor, longest: int, stats: bool) -> Scored:
        return getattr(self.model, HEAD)(states)[:, 0], None


class WholeScorer(Scorer):
    """Scores sequences with the forward pass of any other classifier, using an attention mask. Inference only.

    Args:
        model: An encoder-based sequence classifier.

    Raises:
        ModelError: The model takes no attention mask, so padding would change its scores.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        if "attention_mask" not in inspect.signature(model.forward).parameters:
            raise ModelError(
                f"model {type(model).__name__} takes no attention mask, so padded batches cannot be scored; use "
                "another reward model"
            )

    def forward(
        self,
        inputs: Mapping[str, Any],
        positions: Tensor,
        targets: Tensor,
        longest: int,
        stats: bool = False,
        blocks: tuple[tuple[int, int], ...] = (),
    ) -> ScorerOutput:
        """Score the rows that contain ``positions``. For the arguments, see :meth:`DecoderScorer.forward`."""
        scores = self.model(**inputs).logits[:, 0]
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        rows = positions.div(inputs["input_ids"].shape[1], rounding_mode="floor")
        return ScorerOutput(scores.index_select(0, rows), scores.new_zeros(()), None)


def reward_scorer(model: PreTrainedModel, router_aux_loss: bool = False) -> Scorer:
    """Return the scorer for a sequence classifier."""
    return RewardScorer(model, router_aux_loss) if reads_last_token(model) else WholeScorer(model)


@torch.no_grad()
def check_reward_scorer(scorer: Scorer, device: torch.device) -> None:
    """Compare the scores of a padded batch with the model's scores for each sequence on its own.

    This detects heads that read another position and models whose scores depend on padding.

    Raises:
        ModelError: The scores differ by more than rounding, or the model cannot process a padded batch.
    """
    model = scorer.model
    config, ids = model.config.get_text_config(), probe_ids(model, 8, device)
    if config.pad_token_id is not None:
        ids = ids.where(ids != config.pad_token_id, (ids + 1) % config.vocab_size)
    batch, mask = torch.cat([ids, F.pad(ids[:, :5], (0, 3))]), torch.ones(2, 8, dtype=torch.long, device=device)
    mask[1, 5:] = 0
    ends = torch.tensor([7, 12], device=device)
    with without_dropout(scorer):
        try:
            inputs = {"input_ids": batch, "attention_mask": mask}
            ours = scorer(inputs, ends, batch.view(-1)[ends], 2).scores
            theirs = torch.cat([model(input_ids=part).logits[:, 0] for part in (ids, ids[:, :5])])
        except (ValueError, TypeError) as error:
            raise ModelError(f"model {type(model).__name__} cannot score a padded batch: {error}") from error
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.15
    check_agreement(model, "score", ours, theirs.to(ours.dtype), tolerance * max(1.0, float(theirs.abs().max())))


def longest_sequence(model: PreTrainedModel) -> int | None:
    """Return the maximum number of tokens that the model supports, or None if it has no limit."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not positions or positions < 0:
        return None
    for name, module in model.named_modules():
        # In RoBERTa and related models, the first position is the pad token's ID plus 1.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(positions - module.padding_idx - 1)
    return int(positions)
