"""A sequence classifier with one label as a scorer: one reward per sequence; of two labels it is the first one's.

A decoder's score is read from the hidden state of the sequence's last token, which batches name. transformers' own
forward looks for the last token that is not the pad token, and so misses an end-of-sequence token that pads as well.
Other classifiers (BERT, DeBERTa …) are scored by their own forward, and not trained here.
"""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from alignment.config.errors import ModelError
from alignment.models.architectures import decoder_of
from alignment.models.checking import check_agreement, probe_ids, without_dropout
from alignment.models.head import Scored, replace_copies
from alignment.models.scorer import DecoderScorer, Scorer, ScorerOutput

HEAD = "score"  # what transformers calls the head of every decoder that classifies sequences

HEAD_TENSORS = (f"{HEAD}.weight", f"{HEAD}.base_layer.weight")  # its weight's names: bare, and under an adapter


class RewardHead(nn.Linear):
    """A linear head that computes in fp32 whatever its weights are: in bf16, rewards that differ by 1/256 are ties."""

    @classmethod
    def replacing(cls, linear: nn.Linear) -> RewardHead:
        """A head around the very Parameters of ``linear``; nothing is copied, partitioned parameters stay so."""
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
    """The linear head that classifies, under what PEFT has put around it; None where there is none."""
    head = getattr(model, HEAD, None)
    for wrapped in ("original_module", "base_layer"):
        head = getattr(head, wrapped, head)
    return head if isinstance(head, nn.Linear) else None


def reads_last_token(model: PreTrainedModel) -> bool:
    """Whether the model is a decoder with a linear head over the hidden state of the last token."""
    return linear_head(model) is not None and decoder_of(model) is not None


class RewardScorer(DecoderScorer):
    """A decoder that scores the hidden states at ``positions``: the last token of each sequence.

    Args:
        model: a sequence classifier with one label; its head is replaced by a :class:`RewardHead`.
        router_aux_loss: as for :class:`~alignment.models.scorer.DecoderScorer`.
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
    """Any other classifier with one label, by its own forward with the attention mask; without gradients only.

    Args:
        model: an encoder that classifies sequences.

    Raises:
        ModelError: it takes no attention mask, so padding would change its scores.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        if "attention_mask" not in inspect.signature(model.forward).parameters:
            raise ModelError(f"model {type(model).__name__} takes no attention mask, so no batch of it can be scored")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        positions: Tensor,
        targets: Tensor,
        longest: int,
        stats: bool = False,
        blocks: tuple[tuple[int, int], ...] = (),
    ) -> ScorerOutput:
        """The scores of the rows that hold ``positions``; arguments as for :meth:`DecoderScorer.forward`."""
        scores = self.model(input_ids=input_ids, attention_mask=attention_mask).logits[:, 0]
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        rows = positions.div(input_ids.shape[1], rounding_mode="floor")
        return ScorerOutput(scores.index_select(0, rows), scores.new_zeros(()), None)


def reward_scorer(model: PreTrainedModel, router_aux_loss: bool = False) -> Scorer:
    """The scorer of a sequence classifier."""
    return RewardScorer(model, router_aux_loss) if reads_last_token(model) else WholeScorer(model)


@torch.no_grad()
def check_reward_scorer(scorer: Scorer, device: torch.device) -> None:
    """Compare the scores of a padded batch with the model's own of each sequence alone, before anything is scored.

    This finds the head that reads another position, and the model whose scores depend on padding.

    Raises:
        ModelError: they differ by more than rounding, or the model cannot be called in this way.
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
            ours = scorer(batch, mask, ends, batch.view(-1)[ends], 2).scores
            theirs = torch.cat([model(input_ids=part).logits[:, 0] for part in (ids, ids[:, :5])])
        except (ValueError, TypeError) as error:
            raise ModelError(f"model {type(model).__name__} cannot score a padded batch: {error}") from error
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.15
    check_agreement(model, "score", ours, theirs.to(ours.dtype), tolerance * max(1.0, float(theirs.abs().max())))


def longest_sequence(model: PreTrainedModel) -> int | None:
    """How many tokens the model has positions for; None where there is no limit."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not positions or positions < 0:
        return None
    for name, module in model.named_modules():
        # RoBERTa and its relatives count positions from behind the pad token's id.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(positions - module.padding_idx - 1)
    return int(positions)
