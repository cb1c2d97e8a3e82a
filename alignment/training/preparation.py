"""What a trainer prepares when it is created: models, tokenizer and datasets, planned and checked but not loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from alignment.checkpoint.best import check_best_metric
from alignment.config.errors import OptionError, setting
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import TokenizerOptions
from alignment.config.options_online import OnlineOptions
from alignment.engines.optimizers import check_optimization
from alignment.models.adapters.merged import merge_live
from alignment.models.source import ModelSource
from alignment.models.tasks import CAUSAL_LM
from alignment.models.vocabulary import check_vocabulary
from alignment.planning.engines import EnginePlan, check_alike, plan_engines, with_reference
from alignment.run.console import tell
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
from alignment.training.data import PreparedData, RunData, prepare_data, total_steps, window_sampler
from alignment.training.method import AnyMethod
from alignment.training.tokenizers import with_options


@dataclass(frozen=True)
class GivenModels:
    """The models that the constructor of a trainer received.

    Attributes:
        model: path, Hub name or live model.
        ref_model: the reference, in the same forms; None for the initial policy.
        adapted: the live ``PeftModel`` around ``model``, or None.
        peft_config: PEFT's configuration of adapters to train, or None.
        optimizers: the user's optimizer and schedule, or Nones.
        tokenizers: the tokenizer by its present and its older name, or Nones.
    """

    model: str | PreTrainedModel
    ref_model: str | PreTrainedModel | None
    adapted: Any
    peft_config: Any
    optimizers: tuple[Any, Any]
    tokenizers: tuple[Any, Any]


@dataclass
class PlannedModels:
    """The models of a run before they are loaded.

    Attributes:
        policy, reference: where their weights come from; the same object for the initial policy as the reference.
        processing_class: the tokenizer.
        engines: DeepSpeed configurations, dtypes and placements.
        aux_coefficient: weight of the load-balancing loss of a mixture of experts, or None.
    """

    policy: ModelSource
    reference: ModelSource
    processing_class: Any
    engines: EnginePlan
    aux_coefficient: float | None


def plan_models(args: AlignmentConfig, method: AnyMethod, given: GivenModels) -> PlannedModels:
    """Plan models, tokenizer and engines; nothing is loaded.

    Args:
        args: the run's options.
        method: its method; learns whether adapters are trained.
        given: the constructor's models.

    Raises:
        AlignmentError: if a model, its tokenizer or its placement cannot be used.
    """
    check_optimizers(given.optimizers, given.model)
    model, adapted, needed = given.model, given.adapted, method.needs_reference
    merged = adapted is not None and given.peft_config is not None
    if merged:
        (model, note), adapted = merge_live(adapted), None
        tell(note)
    policy, reference = model_sources(model, given.ref_model, args, needed, method.task)
    same = reference is policy
    if merged:
        policy = replace(policy, merged=True)
    tokenizer = load_tokenizer(*given.tokenizers, policy, args)
    if isinstance(args, TokenizerOptions):
        tokenizer, vocabulary = with_options(tokenizer, args, policy.config.get_text_config().vocab_size)
        if vocabulary:
            policy, added = with_vocabulary(policy, vocabulary, given.optimizers)
            tell(added)
    reference = policy if same else reference
    if method.task is not CAUSAL_LM and policy.config.num_labels > 1:
        tell(f"the model has {policy.config.num_labels} labels; only the first is trained and used as the reward")
    for source in (policy, reference):
        check_vocabulary(tokenizer, source.config.get_text_config().vocab_size, source.name)
    coefficient = balancing_coefficient(args, policy.config)
    plan = plan_engines(args, policy, reference if needed else None, given.peft_config, adapted)
    check_alike(plan)
    tell(plan.dtypes.note)
    if plan.adapters is not None:
        method.trains_adapters = True
        if plan.adapters.are_new and any(given.optimizers):
            raise OptionError(
                "optimizers: cannot contain the parameters of adapters that do not exist yet; pass a PeftModel"
            )
        for line in plan.adapters.notes:
            tell(line)
    return PlannedModels(policy, reference, tokenizer, plan, coefficient)


class DataPreparation:
    """Tokenizes the datasets of a run; collective.

    Args:
        args: the run's options.
        method: its method.
        models: its models.
        retries: retry policy for reads.
    """

    def __init__(self, args: AlignmentConfig, method: AnyMethod, models: PlannedModels, retries: Retries) -> None:
        self.args, self.method, self.models, self.retries = args, method, models, retries

    def __call__(self, train_dataset: Any, eval_dataset: Any, own_optimizer: bool) -> RunData:
        """Return the data of a run, with advice about settings that are unlikely to work well.

        Args:
            train_dataset: a dataset, a list of rows, or a function that loads them; None for evaluation only.
            eval_dataset: in the same forms, or a dict of several.
            own_optimizer: whether the optimizer is the user's.
        """
        args, data = self.args, RunData()
        if train_dataset is not None:
            data.train = self.one(train_dataset, args.max_train_samples, "train_dataset", trains=True)
            data.sampler = window_sampler(data.train, self.method, args)
            steps, report = total_steps(args, data.sampler), data.train.report
            rows = about_rows(report, len(self.method.completions))
            data.advice = [*rows, *self.method.advice(report, data.sampler.window)]
            if not own_optimizer:
                tell(check_optimization(args, steps))
                data.advice += about_steps(args, steps, data.sampler.window)
            for sentence in () if args.dry_run else data.advice:
                tell(f"advice: {sentence}")
        for name, source in named_datasets(eval_dataset).items():
            data.eval[name] = self.one(source, args.max_eval_samples, f"eval_dataset {name}".rstrip())
        return data

    def one(self, source: Any, limit: int | None, where: str, *, trains: bool = False) -> PreparedData:
        """Return one tokenized dataset.

        Args:
            source: a dataset, a list of rows, or a function that loads them.
            limit: number of rows to use, or None.
            where: what to call it in messages, unless the source has a name.
            trains: whether it is trained on.
        """
        load = source if callable(source) else lambda: source
        where = getattr(source, "where", where)
        packing = self.method.packing(trains)
        args = within_positions(self.args, (self.models.policy, self.models.reference))
        data = prepare_data(load, limit, self.method, self.models.processing_class, args, where, self.retries, packing)
        tell(f"{data.where}: {data.report.summary()}")
        return data


def place_for(args: AlignmentConfig, method: AnyMethod, models: PlannedModels, longest: int) -> None:
    """Place the reference again, now that the longest sequence is known, and check the token budget.

    Raises:
        OptionError: if the longest row exceeds ``max_tokens_per_batch``.
    """
    least, budget, plan = longest * max(1, len(method.completions)), args.max_tokens_per_batch, models.engines
    if budget is not None and budget < least:
        raise OptionError(
            f"{setting('max_tokens_per_batch', budget)}: too small for sequences of up to {longest} tokens; set "
            f"at least {least}, or max_length"
        )
    # Online methods generate their sequences, of up to max_length tokens.
    if longest and plan.cards is not None and not isinstance(args, OnlineOptions):
        reference = models.reference if method.needs_reference else None
        models.engines = with_reference(args, plan, reference, reference is models.policy, longest)


def check_evaluation(args: AlignmentConfig, metrics: Iterable[str], evaluation: dict[str, PreparedData]) -> None:
    """Check that there is the data and the metric that the options evaluate.

    Raises:
        OptionError: naming the option.
    """
    if evaluation:
        check_best_metric(args, tuple(metrics), evaluation)
    elif args.eval_strategy != "no" or args.eval_on_start:
        raise OptionError(
            f"eval_strategy: {args.eval_strategy} (eval_on_start: {args.eval_on_start}) requires evaluation "
            "data; set dataset_test_split, or pass eval_dataset"
        )
