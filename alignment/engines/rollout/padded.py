"""The ``generate`` backend: left-padded batches in lock-step, for every model and every processor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from alignment.engines.rollout.padding import padding_unseen
from alignment.engines.rollout.processors import generation_config
from alignment.engines.rollout.request import Completion, Sampling, Work


def generate_padded(
    model: PreTrainedModel,
    chunk: Sequence[Work],
    sampling: Sampling,
    *,
    device: torch.device,
    synced: bool,
    logps: bool = False,
    stepped: Callable[[], object] = lambda: None,
) -> list[list[Completion]]:
    """The completions of a chunk, as lists in its order.

    Args:
        model: in eval mode.
        chunk: at least one prompt of at least one token.
        sampling: what to draw from.
        device: where the model computes.
        synced: keep computing until every rank has finished, as ZeRO-3 needs where it gathers layer by layer.
        logps: return log-probs; costs the memory of all scores, (rows, max_new_tokens, vocabulary) in fp32.
        stepped: called when a token has been drawn for every row that has not ended.
    """
    rows = [work.ids for work in chunk for _ in range(work.count)]
    width = max(map(len, rows))
    padding = [width - len(row) for row in rows]
    ids = torch.tensor([[sampling.pad_token_id] * left + list(row) for left, row in zip(padding, rows)], device=device)
    mask = torch.tensor([[0] * left + [1] * len(row) for left, row in zip(padding, rows)], device=device)
    with padding_unseen(model, padding, device):
        output = model.generate(
            ids,
            attention_mask=mask,
            generation_config=generation_config(sampling, logps),
            stopping_criteria=StoppingCriteriaList([_Steps(stepped)]),
            synced_gpus=synced,
        )
    generated = (output.sequences if logps else output)[:, width:]
    likelihoods = _logps(output.scores, generated).tolist() if logps else [None] * len(rows)
    done = iter(
        [Completion.cut(row, sampling, likelihood) for row, likelihood in zip(generated.tolist(), likelihoods)]
    )
    return [[next(done) for _ in range(work.count)] for work in chunk]


class _Steps(StoppingCriteria):
    """Ends nothing: what transformers asks after each token whether a row has ended."""

    def __init__(self, stepped: Callable[[], object]) -> None:
        self.stepped = stepped

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.stepped()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _logps(scores: Sequence[Tensor], generated: Tensor) -> Tensor:
    """(rows, T) log-probs of (rows, T) ids under T processed scores of (rows, V); one token at a time."""
    return torch.stack(
        [step.log_softmax(-1).gather(1, ids[:, None])[:, 0] for step, ids in zip(scores, generated.T)], dim=1
    )
