"""What a trainer prepares when it is created: models, tokenizer and datasets, planned and checked but not loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from alignment.checkpoint.best import check_best_metric
from alignment.config.errors import OptionError, setting
from alignment.config.options import AlignmentConfig
from alignment.config.options_online import OnlineOptions
from alignment.config.translated import accelerate, sections
from alignment.data.windows import WindowSampler
from alignment.engines.optimizers import check_optimization
from alignment.models.adapters.merged import merge_live
from alignment.models.source import ModelSource
from alignment.models.vocabulary import Vocabulary
from alignment.planning.engines import check_alike, plan_engines, with_reference
from alignment.run.retries import Retries
from alignment.training.advice import about_rows, about_steps
from alignment.training.arguments import (
    balancing_coefficient,
    check_optimizers,
    load_tokenizer,
    model_sources,
    named_datasets,
    with_vocabulary,
    within_positions,
)
from alignment.training.context import Resources
from alignment.training.data import PreparedData, prepare_data, total_steps, window_sampler
from alignment.training.method import AnyMethod


class TrainerPreparation:
    """The part of a trainer that prepares its models and data."""

    args: AlignmentConfig
    method: AnyMethod
    retries: Retries
    policy_source: ModelSource
    reference_source: ModelSource

    if TYPE_CHECKING:

        def tell(self, text: str | None) -> None: ...

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all metrics other than the loss."""
        return (*self.method.metrics, *self.resources.metrics)

    def _prepare_models(
        self,
        model: str | PreTrainedModel,
        ref_model: str | PreTrainedModel | None,
        optimizers: tuple[Any, Any],
        peft_config: Any,
        adapted: Any,
        tokenizers: tuple[Any, Any],
    ) -> None:
        check_optimizers(optimizers, model)
        self.optimizers, needed = optimizers, self.method.needs_reference
        merged = adapted is not None and peft_config is not None
        if merged:
            (model, note), adapted = merge_live(adapted), None
            self.tell(note)
        self.policy_source, self.reference_source = model_sources(
            model, ref_model, self.args, needed, self.method.task
        )
        if merged:
            self._replace_policy(replace(self.policy_source, merged=True))
        self.processing_class = self._tokenizer(load_tokenizer(*tokenizers, self.policy_source, self.args))
        self.aux_coefficient = balancing_coefficient(self.args, self.policy_source.config)
        self.engine_plan = plan_engines(
            self.args, self.policy_source, self.reference_source if needed else None, peft_config, adapted
        )
        check_alike(self.engine_plan)
        self.tell(self.engine_plan.dtypes.note)
        for note in (*accelerate.notes(self.args), *sections.notes(self.args)):
            self.tell(note)
        adapters = self.engine_plan.adapters
        if adapters is not None:
            self.method.trains_adapters = True
            if adapters.are_new and any(optimizers):
                raise OptionError(
                    "optimizers: cannot contain the parameters of adapters that do not exist yet; pass a PeftModel"
                )
            for note in adapters.notes:
                self.tell(note)
        self.resources = self._resources()

    def _replace_policy(self, source: ModelSource) -> None:
        """Replace the policy's model, and the reference's if it is the same."""
        if self.reference_source is self.policy_source:
            self.reference_source = source
        self.policy_source = source

    def _tokenizer(self, tokenizer: Any) -> Any:
        """Return the tokenizer as the method's options require: itself, or a modified copy."""
        return tokenizer

    def _know(self, vocabulary: Vocabulary) -> None:
        """Apply a changed vocabulary to the policy's model."""
        if vocabulary:
            source, note = with_vocabulary(self.policy_source, vocabulary, self.optimizers)
            self._replace_policy(source)
            self.tell(note)

    def _resources(self) -> Resources:
        """Return the method's further resources."""
        return Resources()

    def _prepare_datasets(self, train_dataset: Any, eval_dataset: Any) -> None:
        args = self.args
        self.train_data: PreparedData | None = None
        self.sampler: WindowSampler | None = None
        self.advice: list[str] = []
        if train_dataset is not None:
            self.train_data = self._prepare(train_dataset, args.max_train_samples, "train_dataset", trains=True)
            self.sampler = window_sampler(self.train_data, self.method, args)
            steps, report = total_steps(args, self.sampler), self.train_data.report
            rows = about_rows(report, len(self.method.completions))
            self.advice = [*rows, *self.method.advice(report, self.sampler.window)]
            if not any(self.optimizers):
                self.tell(check_optimization(args, steps))
                self.advice += about_steps(args, steps, self.sampler.window)
            for sentence in () if args.dry_run else self.advice:
                self.tell(f"advice: {sentence}")
        self.eval_data = {
            name: self._prepare(source, args.max_eval_samples, f"eval_dataset{f' {name}' if name else ''}")
            for name, source in named_datasets(eval_dataset).items()
        }
        prepared = [data for data in (self.train_data, *self.eval_data.values()) if data is not None]
        for data in prepared:
            self.resources.check_data(data)
        self._check_evaluation()
        self._plan_for(max((data.table.longest for data in prepared), default=0))

    def _plan_for(self, longest: int) -> None:
        """Place the reference again, now that the longest sequence is known, and check the token budget."""
        args, plan = self.args, self.engine_plan
        least, budget = longest * max(1, len(self.method.completions)), args.max_tokens_per_batch
        if budget is not None and budget < least:
            raise OptionError(
                f"{setting('max_tokens_per_batch', budget)}: too small for sequences of up to {longest} tokens; set "
                f"at least {least}, or max_length"
            )
        # Online methods generate their sequences, of up to max_length tokens.
        if longest and plan.cards is not None and not isinstance(args, OnlineOptions):
            reference = self.reference_source if self.method.needs_reference else None
            own = reference is self.policy_source
            self.engine_plan = with_reference(args, plan, reference, own, longest)

    def _check_evaluation(self) -> None:
        args = self.args
        if self.eval_data:
            check_best_metric(args, self.metrics, self.eval_data)
        elif args.eval_strategy != "no" or args.eval_on_start:
            raise OptionError(
                f"eval_strategy: {args.eval_strategy.value} (eval_on_start: {args.eval_on_start}) requires evaluation "
                "data; set dataset_test_split, or pass eval_dataset"
            )

    def _prepare(self, source: Any, limit: int | None, where: str, *, trains: bool = False) -> PreparedData:
        load = source if callable(source) else lambda: source
        where = getattr(source, "where", where)
        packing = self.method.packing(trains)
        args = within_positions(self.args, (self.policy_source, self.reference_source))
        data = prepare_data(load, limit, self.method, self.processing_class, args, where, self.retries, packing)
        self.tell(f"{data.where}: {data.report.summary()}")
        return data
