"""What a trainer prepares when it is created: models, tokenizer and datasets, planned and checked but not loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from alignment.config.errors import OptionError, setting
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import TokenizerOptions
from alignment.config.options_online import OnlineOptions
from alignment.engines.collectives import together
from alignment.models.adapters.merged import merge_live
from alignment.models.source import ModelSource
from alignment.models.tasks import CAUSAL_LM
from alignment.models.vocabulary import check_vocabulary
from alignment.planning.engines import EnginePlan, check_alike, plan_engines, with_reference
from alignment.run.console import tell
from alignment.run.ending import OtherRankFailed
from alignment.training.arguments import (
    balancing_coefficient,
    check_optimizers,
    model_sources,
)
from alignment.training.method import AnyMethod
from alignment.training.tokenizers import load_tokenizer, with_options, with_vocabulary


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
    """Plan models, tokenizer and engines; nothing is loaded. Collective.

    Args:
        args: the run's options.
        method: its method; learns whether adapters are trained.
        given: the constructor's models.

    Raises:
        AlignmentError: if a model, its tokenizer or its placement cannot be used.
        OtherRankFailed: if another rank cannot use its models or its tokenizer.
    """
    check_optimizers(given.optimizers, given.model)
    with together(OtherRankFailed):
        policy, reference, tokenizer, adapted = _models(args, method, given)
        coefficient = balancing_coefficient(args, policy.config)
    plan = plan_engines(args, policy, reference if method.needs_reference else None, given.peft_config, adapted)
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


def _models(args: AlignmentConfig, method: AnyMethod, given: GivenModels) -> tuple[ModelSource, ModelSource, Any, Any]:
    """Return policy, reference, tokenizer and the live ``PeftModel`` of adapters that are trained, or None."""
    model, adapted = given.model, given.adapted
    merged = adapted is not None and given.peft_config is not None
    if merged:
        (model, note), adapted = merge_live(adapted), None
        tell(note)
    policy, reference = model_sources(model, given.ref_model, args, method.needs_reference, method.task)
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
    return policy, reference, tokenizer, adapted


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
