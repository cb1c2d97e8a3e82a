"""The ``generate`` backend: left-padded batches in lock-step, for every model and every processor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from alignment.engines.rollout.backends import Generation, RolloutBackend
from alignment.engines.rollout.padding import padding_unseen
from alignment.engines.rollout.processors import generation_config
from alignment.engines.rollout.request import Completion, Sampling, Work


class PaddedBackend(RolloutBackend):
    """Works everywhere."""

    name = "generate"
    needs_whole_weights = False
    unit = "step"

    def obstacle(self, model: PreTrainedModel, sampling: Sampling) -> str | None:
        """There is none."""
        return None

    def pays(self, model: PreTrainedModel) -> bool:
        """Always."""
        return True

    def ticks(self, chunk: Sequence[Work], sampling: Sampling) -> int:
        """One for each token that is drawn for all rows; fewer if all of them end before."""
        return sampling.max_new_tokens

    def generate(self, chunk: Sequence[Work], generation: Generation) -> list[list[Completion]]:
        """As :class:`RolloutBackend` says; ``logps`` cost all scores, (rows, new tokens, vocabulary) in fp32."""
        sampling, device, logps = generation.sampling, generation.device, generation.logps
        rows = [work.ids for work in chunk for _ in range(work.count)]
        width = max(map(len, rows))
        padding = [width - len(row) for row in rows]
        padded = [[sampling.pad_token_id] * left + list(row) for left, row in zip(padding, rows)]
        mask = [[0] * left + [1] * len(row) for left, row in zip(padding, rows)]
        with padding_unseen(generation.model, padding, device):
            output = generation.model.generate(
                torch.tensor(padded, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=generation_config(sampling, logps),
                stopping_criteria=StoppingCriteriaList([_Steps(generation.tick)]),
                synced_gpus=generation.by_layer,
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
