"""Online DPO: the policy's own completions, ranked during training and compared with a reference model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alignment.config.errors import OptionError, counted
from alignment.data.batching import Batch
from alignment.data.kinds.prompts import PROMPTS
from alignment.data.windows import WindowCounts
from alignment.engines.scoring import SequenceOutput
from alignment.methods.online_dpo_options import OnlineDPOConfig
from alignment.objectives.dpo import dpo_loss
from alignment.online.arguments import is_classifier, listed
from alignment.online.pairs import RankedBatch
from alignment.online.ranking import REASONS, REMEDIES
from alignment.online.resources import Function, OnlineResources
from alignment.references.base import RowIds
from alignment.reporting.metrics import REWARDS, add_rewards, add_sides, sides
from alignment.training.context import Resources
from alignment.training.method import Items, Method, RowLosses, Window
from alignment.training.trainer import AlignmentTrainer

MOST_WITHOUT_PAIRS = 0.25  # share of windows without a pair


class OnlineDPOMethod(Method[RankedBatch]):
    """Trains on pairs that :class:`OnlineWindowPass` generates for the prompts of a window."""

    kind = PROMPTS
    metrics = (
        *(f"objective/{what}" for what in ("kl", "entropy", "non_score_reward", "rlhf_reward")),
        *(*REWARDS, *sides("logps"), "entropy"),
        *("val/contain_eos_token", "completions/mean_length", "completions/mean_terminated_length"),
        *("pairs/dropped", *(f"pairs/{reason}" for reason in REASONS)),
        *("beta", "win_rate"),
    )
    reduced_windows = "windows_without_pairs"
    options: OnlineDPOConfig

    @property
    def needs_reference(self) -> bool:
        return self.options.needs_reference

    def beta(self, epoch: int) -> float:
        """Return the beta of an epoch; the last value applies to all further epochs."""
        betas = self.options.betas
        return betas[min(epoch, len(betas) - 1)]

    def check_window(self, counts: WindowCounts, items: Items) -> str | None:
        if counts.rows == 0:
            return f"no prompt of this window gave a pair to train on ({_reasons(items)}); its update was skipped"
        return None

    def check_reduced(self, in_a_row: int, items: Items) -> str | None:
        most = self.options.max_windows_without_pairs
        if most is None or in_a_row < most:
            return None
        why = max(REMEDIES, key=lambda reason: items[f"pairs/{reason}"][0])
        return (
            f"no prompt of the last {counted(in_a_row, 'window')} gave a pair to train on (last window: "
            f"{_reasons(items)}), so the model learns nothing; {REMEDIES[why]}, or change max_windows_without_pairs"
        )

    def advice_at_end(self, reduced: int, steps: int, history: Sequence[Mapping[str, Any]]) -> list[str]:
        if reduced < steps * MOST_WITHOUT_PAIRS:
            return []
        why = max(REMEDIES, key=lambda reason: sum(entry.get(f"pairs/{reason}", 0.0) for entry in history))
        return [
            f"{reduced} of {counted(steps, 'window')} had no pair to train on, so no update was made with them; most "
            f"prompts without a pair were {why}: {REMEDIES[why]}"
        ]

    def scored(self, batch: RankedBatch) -> Batch:
        # One row per completion; rows that share the prompt of a pair would be built here.
        return batch.pairs

    def before_training(self, window: Window[RankedBatch]) -> list[Tensor]:
        return window.reference_logps(lambda batch, dataset: (batch.pairs, RowIds(dataset, batch.rows)))

    def losses(
        self,
        batch: RankedBatch,
        index: int,
        output: SequenceOutput,
        known: list[Tensor],
        window: Window[RankedBatch],
    ) -> RowLosses:
        assert output.entropy is not None
        pairs, logps, reference, sums = len(batch.rows), output.scores, known[index], window.sums
        result = dpo_loss(
            logps[:pairs],
            logps[pairs:],
            reference[:pairs],
            reference[pairs:],
            self.options.LOSSES[self.options.loss_type],
            beta=batch.beta,
        )
        kl = logps.detach() - reference
        sums.add("objective/kl", kl.sum(), 2 * pairs)
        sums.add("objective/entropy", output.entropy.sum(), 2 * pairs)
        sums.add("objective/non_score_reward", -batch.beta * kl.sum(), 2 * pairs)
        add_rewards(sums, result.chosen_rewards, result.rejected_rewards)
        add_sides(sums, "logps", logps)
        sums.add("entropy", output.entropy.sum(), batch.pairs.lengths.sum())
        if batch.scores is not None:
            given = batch.scores.to(logps.device)
            sums.add("objective/rlhf_reward", (given - batch.beta * kl).sum(), 2 * pairs)
            sums.add("objective/scores_margin", (given[:pairs] - given[pairs:]).sum(), pairs)
        return RowLosses(result.losses.sum() / window.counts.rows, result.losses.detach())


def _reasons(items: Items) -> str:
    """Return the number of a window's prompts by reason, such as ``4 prompts: 3 tied, 1 identical``."""
    found = {reason: int(items[f"pairs/{reason}"][0]) for reason in REASONS}
    prompts = counted(int(items["pairs/dropped"][1]), "prompt")
    return f"{prompts}: {', '.join(f'{count} {reason}' for reason, count in found.items() if count)}"


class OnlineDPOTrainer(AlignmentTrainer):
    """Trainer for Online DPO on ``prompt`` rows. Further columns are passed to reward functions by name.

    Args:
        model: the policy: a path, a Hub name or a model object.
        ref_model: the reference. Defaults to the initial policy.
        reward_model: a sequence classifier with one label: a path, a Hub name or a model object.
        reward_funcs: one or several functions ``f(prompts, completions, **columns) -> scores``, names of functions as
            ``file.py:function``, or further reward models; can be combined with ``reward_model``.
        judge: instead of rewards, a callable or an object with a method ``judge``: (prompts, pairs) -> 0, 1 or -1 for
            each pair.
        reward_processing_class: tokenizer of the reward model. Defaults to the one in its folder.
        reward_processing_classes: tokenizers of several reward models, one for each source of rewards; None for
            functions.
        **arguments: arguments of :class:`~alignment.training.trainer.AlignmentTrainer`.
    """

    config_class: ClassVar[type[OnlineDPOConfig]] = OnlineDPOConfig
    method_class = OnlineDPOMethod
    takes_reference = True
    args: OnlineDPOConfig
    method: OnlineDPOMethod

    def __init__(
        self,
        model: str | PreTrainedModel | None = None,
        ref_model: str | PreTrainedModel | None = None,
        *positional: Any,
        reward_model: str | PreTrainedModel | None = None,
        reward_funcs: Function | Sequence[Function] | None = None,
        judge: Any = None,
        reward_processing_class: Any = None,
        reward_processing_classes: Any = None,
        **arguments: Any,
    ) -> None:
        if reward_processing_class is not None and reward_processing_classes is not None:
            raise OptionError(
                "reward_processing_class and reward_processing_classes contradict each other; remove one of them"
            )
        tokenizers = reward_processing_classes if reward_processing_class is None else reward_processing_class
        self._given = (reward_model, reward_funcs, judge, tokenizers)
        super().__init__(model, ref_model, *positional, **arguments)

    @property
    def reward_funcs(self) -> list[Function]:
        """The sources of rewards in order: models and functions. Empty with a judge."""
        model, functions, judge, _ = self._given
        if judge is not None or self.args.judge is not None:
            return []
        model = self.args.reward_model_path if model is None else model
        return [
            *([] if model is None else [model]),
            *listed(self.args.reward_funcs if functions is None else functions),
        ]

    @property
    def reward_weights(self) -> Tensor:
        """The weight of each of :attr:`reward_funcs`: (N,) fp32."""
        weights = self.args.reward_weights or [1.0] * len(self.reward_funcs)
        return torch.tensor(weights, dtype=torch.float32)

    def _models_read(self) -> Iterable[tuple[str, Any]]:
        reward_model, functions, *_ = self._given
        given = listed(self.args.reward_funcs if functions is None else functions)
        return [("reward_model", reward_model), *(("reward_funcs", one) for one in given if is_classifier(one))]

    def _resources(self) -> Resources:
        stage = self.planned.engines.policy["zero_optimization"]["stage"]
        trained = (self.planned.policy.live, self.planned.reference.live)
        return OnlineResources(
            self.args,
            self.planned.engines.dtypes,
            stage,
            *self._given,
            trained=trained,
            beta=self.method.beta,
            retries=self.retries,
            cards=self.planned.engines.cards,
            policy=(self.planned.engines.source, self.planned.engines.adapters),
        )
