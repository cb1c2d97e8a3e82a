"""Reward model training: a sequence classifier with one label learns which completion of a pair is better."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.trainer_utils import PredictionOutput

from alignment.data.batching import Batch, ends
from alignment.data.kinds.pairs import PreferenceBatch
from alignment.data.kinds.scored_pairs import SCORED_PAIRS
from alignment.engines.collectives import gathered
from alignment.engines.scoring import SequenceOutput
from alignment.methods.reward_options import RewardConfig
from alignment.models.tasks import REWARD_MODEL
from alignment.objectives.pairs import bradley_terry
from alignment.reporting.metrics import REWARDS, add_rewards
from alignment.run.protection import protected
from alignment.training.context import Resources
from alignment.training.data import PreparedData, RunData
from alignment.training.evaluation import evaluation_window
from alignment.training.method import Method, RowLosses, Window
from alignment.training.trainer import AlignmentTrainer, refuse_ignored_keys

_ROWS_LOOKED_AT = 1000  # to find out which tokens sequences end with


class RewardMethod(Method[PreferenceBatch]):
    """Scores both completions of every pair at their last tokens in one forward pass."""

    kind = SCORED_PAIRS
    metrics = (*REWARDS, "mean_reward")
    task = REWARD_MODEL
    options: RewardConfig

    def shown(self, rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Join each prompt with its completions: ``chosen_ids``, ``rejected_ids``, and ``margin``."""
        prompts = rows["prompt_ids"]
        sides = {name: [[*p, *ids] for p, ids in zip(prompts, rows[name], strict=True)] for name in self.completions}
        return {**sides, "margin": rows["margin"]}

    def scored(self, batch: PreferenceBatch) -> Batch:
        return ends(batch.pairs)

    def losses(
        self, batch: PreferenceBatch, index: int, output: SequenceOutput, known: Any, window: Window[PreferenceBatch]
    ) -> RowLosses:
        assert batch.margins is not None
        rewards, pairs = output.scores, len(batch.rows)
        result = bradley_terry(
            rewards[:pairs],
            rewards[pairs:],
            batch.margins.to(rewards.device),
            self.options.center_rewards_coefficient,
        )
        add_rewards(window.sums, result.chosen_rewards, result.rejected_rewards)
        window.sums.add("mean_reward", rewards.sum(), 2 * pairs)
        return RowLosses(result.losses.sum() / window.counts.rows, result.losses.detach())


class RewardTrainer(AlignmentTrainer):
    """Trainer for reward models on ``chosen, rejected`` pairs, with or without a prompt and a ``margin``.

    The model is a causal language model, which gets a new head, or a sequence classifier with one label. Load the
    saved model with ``AutoModelForSequenceClassification``. Takes the arguments of
    :class:`~alignment.training.trainer.AlignmentTrainer`.
    """

    config_class: ClassVar[type[RewardConfig]] = RewardConfig
    method_class = RewardMethod

    def _resources(self) -> Resources:
        return _Pad()

    def _prepare_data(self, train_dataset: Any, eval_dataset: Any, optimizers: tuple[Any, Any]) -> RunData:
        data = super()._prepare_data(train_dataset, eval_dataset, optimizers)
        assert isinstance(self.resources, _Pad)
        endings = {self.processing_class.eos_token_id}
        if data.train is not None:
            rows = data.train.dataset[:_ROWS_LOOKED_AT]
            endings |= {ids[-1] for name in self.method.completions for ids in rows[name]}
        self.planned.processing_class, self.resources.token = with_own_pad(self.processing_class, endings)
        return data

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Compute the rewards of both completions of every row, and loss and metrics. Collective.

        Args:
            test_dataset: a dataset or a list of rows.
            ignore_keys: must be empty, as for :meth:`evaluate`.
            metric_key_prefix: prefix of the names of the metrics.

        Returns:
            transformers' ``PredictionOutput``. ``predictions``: (R, 2) fp32, the chosen completion's reward first, in
            the order of the rows; rows that are too long to train on are omitted. ``label_ids``: (R,) zeros, the index
            of the better completion. ``metrics``: loss and metrics.
        """
        refuse_ignored_keys(ignore_keys)
        with protected(self.output_dir, self.args):
            data = self._preparation().one(test_dataset, None, "test_dataset")
            metrics = self._evaluate_sets({"": data}, metric_key_prefix)
            scores = self._pair_scores(data)
        return PredictionOutput(scores, np.zeros(len(scores), dtype=np.int64), metrics)

    def _pair_scores(self, data: PreparedData) -> NDArray[np.float32]:
        """Return (R, 2) fp32 scores of the chosen and the rejected completion of each tokenized row. Collective."""
        policy = self.engines.window_pass.models.policy
        own: dict[int, tuple[np.float32, np.float32]] = {}
        for batch in evaluation_window(self.context, data)[1]:
            with policy.inference():
                scores = policy.forward(self.method.scored(batch)).scores.cpu().numpy().astype(np.float32)
            pairs = len(batch.rows)
            own |= dict(zip(batch.rows, zip(scores[:pairs], scores[pairs:], strict=True), strict=True))
        everyone = {row: pair for part in gathered(own) for row, pair in part.items()}
        return np.array([everyone[row] for row in range(len(data.table))], dtype=np.float32)


class _Pad(Resources):
    """Writes the id of the padding token to the model's configuration."""

    token: int | None = None

    def built(self, model: PreTrainedModel) -> None:
        model.config.get_text_config().pad_token_id = self.token


def with_own_pad(tokenizer: Any, endings: Collection[int | None]) -> tuple[Any, int | None]:
    """Choose a padding token that ends no sequence, to save with a reward model.

    transformers' own forward pass returns the score at the last token that is not padding. If the end-of-sequence
    token was the padding token as well, that would be the token before it.

    Args:
        tokenizer: the tokenizer.
        endings: ids of the tokens that sequences end with.

    Returns:
        The tokenizer, or a copy with another padding token, and the id of the padding token. The id is None if the
        tokenizer has no such token; transformers then rejects padded batches.
    """
    special = sorted(tokenizer.all_special_tokens, key=lambda token: token == tokenizer.bos_token)
    for token in (tokenizer.pad_token, tokenizer.unk_token, *special):
        number = None if token is None else tokenizer.convert_tokens_to_ids(token)
        if number is not None and number not in endings:
            if token != tokenizer.pad_token:
                tokenizer = copy.deepcopy(tokenizer)
                tokenizer.pad_token = token
            return tokenizer, number
    return tokenizer, None
