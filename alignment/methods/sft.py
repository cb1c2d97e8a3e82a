"""Supervised fine-tuning on given completions, with the same loop and engines as the preference methods."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from datasets import IterableDataset

from alignment.config.errors import OptionError
from alignment.config.fields import keywords
from alignment.data.batching import Batch
from alignment.data.kinds.completions import CompletionBatch, Completions
from alignment.data.mixture import Part
from alignment.data.packing import Packing
from alignment.data.sources import dataset_from_python
from alignment.data.targets import IGNORED, Format, formatted
from alignment.engines.scoring import SequenceOutput
from alignment.methods.sft_options import SFTConfig
from alignment.objectives.table import Loss
from alignment.training.data import DataPreparation, PreparedData
from alignment.training.method import Method, RowLosses, Window
from alignment.training.trainer import AlignmentTrainer


class SFTMethod(Method[CompletionBatch]):
    """Averages the loss over all trained tokens of the window."""

    metrics = ("entropy", "mean_token_accuracy")
    options: SFTConfig

    @property
    def kind(self) -> Completions:  # type: ignore[override]
        options = self.options
        return Completions(
            options.completion_only_loss,
            options.assistant_only_loss,
            options.dataset_text_field,
            tokenized=bool(keywords(options.dataset_kwargs).get("skip_prepare_dataset")),
        )

    def shown(self, rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Join prompt and completion: ``input_ids``, and ``labels`` that are -100 for tokens not in the loss.

        If all tokens of a row are in the loss, the first one has a label too, although it cannot be predicted.
        """
        names, count = ("prompt_ids", "completion_ids", "scored", "first"), len(rows["prompt_ids"])
        shown: dict[str, list[Any]] = {"input_ids": [], "labels": []}
        for prompt, completion, scored, first in zip(*(rows.get(name, [None] * count) for name in names), strict=True):
            kept = [bool(first)][: len(prompt)] + [False] * (len(prompt) - 1) + (scored or [True] * len(completion))
            shown["input_ids"].append([*prompt, *completion])
            shown["labels"].append([i if learned else IGNORED for i, learned in zip([*prompt, *completion], kept)])
        return shown

    def scored(self, batch: CompletionBatch) -> Batch:
        return batch.completions

    def packing(self, trains: bool) -> Packing | None:
        options = self.options
        packs = options.packing if trains or options.eval_packing is None else options.eval_packing
        if not packs:
            return None
        assert options.max_length is not None
        seed = options.seed if options.shuffle_dataset else None
        return Packing(options.packing_strategy, options.max_length, seed)

    @property
    def needs_tokens(self) -> bool:  # type: ignore[override]
        return "tokens" in self._loss.needs

    @property
    def _loss(self) -> Loss:
        return self.options.LOSSES[self.options.loss_type or "nll"]

    def losses(
        self, batch: CompletionBatch, index: int, output: SequenceOutput, known: Any, window: Window[CompletionBatch]
    ) -> RowLosses:
        assert output.entropy is not None and output.top1 is not None
        lengths = batch.completions.lengths.to(output.scores.device)
        window.sums.add("entropy", output.entropy.sum(), lengths.sum())
        window.sums.add("mean_token_accuracy", output.top1.sum(), lengths.sum())
        logps = output.token_logps if self.needs_tokens else output.scores
        assert logps is not None
        losses = self._loss.function(logps)
        rows = losses.detach()
        if self.needs_tokens:
            rows = torch.zeros_like(output.scores).index_add(0, batch.completions.segments.to(rows.device), rows)
        return RowLosses(losses.sum() / window.counts.first_completion_tokens, rows / lengths)


class SFTTrainer(AlignmentTrainer):
    """Trainer for SFT on ``prompt, completion`` rows, ``messages``, ``text``, or token ids (``input_ids``).

    Args:
        formatting_func: returns the text to train on for a row with any columns.

    Takes the other arguments of :class:`~alignment.training.trainer.AlignmentTrainer`.
    """

    config_class: ClassVar[type[SFTConfig]] = SFTConfig
    method_class = SFTMethod

    def __init__(self, *args: Any, formatting_func: Format | None = None, **kwargs: Any) -> None:
        self.formatting_func = formatting_func
        super().__init__(*args, **kwargs)

    def _preparation(self) -> DataPreparation:
        return _Formatting(self, self.formatting_func)


class _Formatting(DataPreparation):
    """Tokenizes the texts that a function returns for rows."""

    def __init__(self, trainer: SFTTrainer, function: Format | None) -> None:
        super().__init__(trainer.args, trainer.method, trainer.planned, trainer.retries)
        self.function = function

    def one(self, source: Any, limit: int | None, where: str, *, trains: bool = False) -> PreparedData:
        if self.function is not None:
            assert isinstance(self.args, SFTConfig)
            where, column = getattr(source, "where", where), self.args.dataset_text_field
            source = Part(where, functools.partial(_formatted, source, self.function, where, column))
        return super().one(source, limit, where, trains=trains)


def _formatted(source: Any, function: Format, where: str, column: str) -> Any:
    """Load rows, and format them with ``formatting_func``."""
    given = source.load() if isinstance(source, Part) else source
    if isinstance(given, tuple):
        raise OptionError(
            "formatting_func: not supported with dataset_mixture; use datasets with a text column, or column_map"
        )
    data = given if isinstance(given, IterableDataset) else dataset_from_python(given)
    return formatted(data, function, where, column)
