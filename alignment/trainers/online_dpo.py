"""Online DPO: the policy's own completions, ranked as they come, judged against a reference model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from alignment.config.errors import OptionError
from alignment.config.online_dpo import OnlineDPOConfig
from alignment.data.batching import AnyBatch, Batch, Collate, collate_prompts
from alignment.data.windows import WindowCounts
from alignment.engines.phases import Phases
from alignment.engines.scoring import SequenceScores
from alignment.objectives.dpo import dpo_loss
from alignment.reporting.metrics import MetricSums
from alignment.trainers.base import AlignmentTrainer
from alignment.trainers.method import Method, Models, RowLosses
from alignment.trainers.online_setup import Function, OnlinePlan
from alignment.trainers.online_window import OnlineWindowPass
from alignment.trainers.pairs import REASONS, RankedBatch
from alignment.trainers.window import WindowPass


class _Swept(NamedTuple):
    reference: list[Tensor]


class OnlineDPOMethod(Method):
    """Its windows are prompts; :class:`OnlineWindowPass` has made pairs of them before the method sees them."""

    name = "online_dpo"
    kind = "prompts"
    completions = ()
    metrics = (
        *(f"objective/{what}" for what in ("kl", "entropy", "non_score_reward", "rlhf_reward")),
        *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "logps/rejected", "entropy"),
        *("val/contain_eos_token", "completions/mean_length", "completions/mean_terminated_length"),
        *("pairs/dropped", *(f"pairs/{reason}" for reason in REASONS)),
        *("beta", "win_rate"),
    )
    reduced_windows = "windows_without_pairs"
    options: OnlineDPOConfig

    @property
    def collate(self) -> Collate:
        return collate_prompts

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def passes(self) -> int:
        return 2

    def check_window(self, counts: WindowCounts) -> str | None:
        if counts.rows == 0:
            return "no prompt gave a pair with a better side (see pairs/…): this window made no update"
        return None

    def scored(self, batch: AnyBatch) -> Batch:
        assert isinstance(batch, RankedBatch)
        # A row for each completion; one shared-prompt row for a pair would be made here.
        return batch.pairs

    def sweep(
        self, batches: Sequence[AnyBatch], counts: WindowCounts, models: Models, sums: MetricSums, phases: Phases
    ) -> _Swept:
        assert models.reference is not None
        reference = []
        with phases("reference") as record:
            for batch in batches:
                scored = self.scored(batch)
                record.tokens += scored.tokens
                reference.append(models.reference.sequence_logps(scored))
        return _Swept(reference)

    def losses(
        self,
        batch: AnyBatch,
        index: int,
        scores: SequenceScores,
        swept: _Swept,
        counts: WindowCounts,
        sums: MetricSums,
    ) -> RowLosses:
        assert isinstance(batch, RankedBatch) and scores.entropy is not None
        pairs, logps, reference = len(batch.rows), scores.logps, swept.reference[index]
        result = dpo_loss(
            logps[:pairs],
            logps[pairs:],
            reference[:pairs],
            reference[pairs:],
            loss_type=self.options.loss_type,
            beta=batch.beta,
        )
        kl = logps.detach() - reference
        for name, total, count in (
            ("objective/kl", kl.sum(), 2 * pairs),
            ("objective/entropy", scores.entropy.sum(), 2 * pairs),
            ("objective/non_score_reward", -batch.beta * kl.sum(), 2 * pairs),
            ("rewards/chosen", result.chosen_rewards.sum(), pairs),
            ("rewards/rejected", result.rejected_rewards.sum(), pairs),
            ("rewards/accuracies", (result.chosen_rewards > result.rejected_rewards).sum(), pairs),
            ("logps/chosen", logps[:pairs].sum(), pairs),
            ("logps/rejected", logps[pairs:].sum(), pairs),
            ("entropy", scores.entropy.sum(), batch.pairs.lengths.sum()),
        ):
            sums.add(name, total, count)
        if batch.scores is not None:
            given = batch.scores.to(logps.device)
            sums.add("objective/rlhf_reward", (given - batch.beta * kl).sum(), 2 * pairs)
            sums.add("objective/scores_margin", (given[:pairs] - given[pairs:]).sum(), pairs)
        return RowLosses(result.losses.sum() / counts.rows, result.losses.detach())


class OnlineDPOTrainer(AlignmentTrainer):
    """Trains with Online DPO on ``prompt`` rows; further columns are handed to reward functions by name.

    Args:
        model: the policy: path, hub name or live model.
        ref_model: the reference; None means the policy as it is given here.
        reward_model: a sequence classifier with one label: path, hub name or live model.
        reward_funcs: functions ``f(prompts, completions, **columns) -> scores``, or names of such as
            ``file.py:function``, or further reward models; one or several, also beside ``reward_model``.
        judge: in place of rewards, a callable or object with ``judge``: (prompts, pairs) -> 0, 1 or -1 for each pair.
        reward_processing_class: the reward model's tokenizer; None loads the one of its folder.
        reward_processing_classes: the same for several, one for each source of rewards, None for functions.
        **arguments: as of :class:`~alignment.trainers.base.AlignmentTrainer`.
    """

    config_class: ClassVar[type[OnlineDPOConfig]] = OnlineDPOConfig
    method_class = OnlineDPOMethod
    args: OnlineDPOConfig

    def __init__(
        self,
        model: str | PreTrainedModel | None = None,
        ref_model: str | PreTrainedModel | None = None,
        reward_model: str | PreTrainedModel | None = None,
        reward_funcs: Function | Sequence[Function] | None = None,
        judge: Any = None,
        reward_processing_class: Any = None,
        reward_processing_classes: Any = None,
        **arguments: Any,
    ) -> None:
        if reward_processing_class is not None and reward_processing_classes is not None:
            raise OptionError("reward_processing_classes: reward_processing_class was given as well; leave one out")
        tokenizers = reward_processing_classes if reward_processing_class is None else reward_processing_class
        self._given = (reward_model, reward_funcs, judge, tokenizers)
        self._online: OnlinePlan | None = None
        super().__init__(model, ref_model, **arguments)

    def _prepare_models(self, *given: Any) -> None:
        super()._prepare_models(*given)
        stage = self.engine_plan.policy["zero_optimization"]["stage"]
        trained = (self.policy_source.live, self.reference_source.live)
        self._online = OnlinePlan(self.args, self.engine_plan.dtypes, stage, *self._given, trained=trained)

    @property
    def metrics(self) -> tuple[str, ...]:
        assert self._online is not None
        return (*super().metrics, *self._online.critic.metrics)

    def _prepare_datasets(self, train_dataset: Any, eval_dataset: Any) -> None:
        super()._prepare_datasets(train_dataset, eval_dataset)
        assert self._online is not None
        for data in (self.train_data, *self.eval_data.values()):
            if data is not None:
                self._online.check_data(data)

    def _build_more(self, built: contextlib.ExitStack) -> None:
        assert self._online is not None
        built.callback(self._online.close)
        self._online.build()
        for line in self._online.describe():
            self.tell(line)

    def _make_pass(self, models: Models) -> WindowPass:
        assert self._online is not None
        online = self._online.online(models.policy, self.processing_class, self.output_dir, self.events.handler)
        return OnlineWindowPass(self.method, models, self.phases, self.aux_coefficient, self.args, online)

    def settings(self) -> dict[str, Any]:
        """With the reward model's DeepSpeed JSON, if there is one."""
        assert self._online is not None
        return super().settings() | self._online.settings()

    def close(self) -> None:
        if self._online is not None:
            self._online.close()
        super().close()
