"""From options to the policy's engine and the plan of the reference, each with its own DeepSpeed configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from alignment.config.deepspeed import load_deepspeed_config, policy_config
from alignment.config.dtypes import DtypePlan, plan_dtypes
from alignment.config.errors import OptionError
from alignment.config.frozen import placement_of, plan_frozen
from alignment.config.options import AlignmentConfig
from alignment.engines.building import checked, frozen_engine
from alignment.engines.launch_env import world_size
from alignment.engines.optimization import build_optimizer, build_scheduler
from alignment.engines.scoring import PolicyEngine, ScoringEngine
from alignment.models.architecture import CAUSAL_LM, Architecture
from alignment.models.loading import disable_dropout, enable_checkpointing
from alignment.models.source import ModelSource
from alignment.references.engine import ReferencePlan


@dataclass(frozen=True)
class EnginePlan:
    """Dtypes and DeepSpeed configurations of policy and reference, decided before anything is loaded.

    Attributes:
        dtypes: the run's.
        source: the policy's model.
        policy: JSON of the engine that trains it.
        policy_frozen: JSON of the engine that only evaluates it.
        reference: the reference; None for a method without one.
    """

    dtypes: DtypePlan
    source: ModelSource
    policy: dict[str, Any]
    policy_frozen: dict[str, Any]
    reference: ReferencePlan | None

    @property
    def compute(self) -> torch.dtype:
        """The dtype of weights and activations."""
        dtype: torch.dtype = getattr(torch, self.dtypes.compute)
        return dtype

    def describe(self) -> str:
        """One line for the start of a run: where policy and reference live, in which format, at what cost."""
        stage = self.policy["zero_optimization"]["stage"]
        formats = f"computing in {self.dtypes.compute}, {self.dtypes.master} masters"
        text = f"policy: {self.source.name}, ZeRO stage {stage}, {formats}"
        return f"{text}; {'no reference model' if self.reference is None else self.reference.describe()}"


def plan_engines(options: AlignmentConfig, policy: ModelSource, reference: ModelSource | None) -> EnginePlan:
    """Build every DeepSpeed configuration of the run.

    Args:
        options: the run's.
        policy: the policy's model.
        reference: the reference's, which may be of another size; None for a method without one.

    Raises:
        OptionError: a key or value of the JSON files that DeepSpeed would ignore or that contradicts the options.
    """
    base = load_deepspeed_config(options.deepspeed, "zero2")
    dtypes = plan_dtypes(options, base)
    world, width = world_size(), _width(policy)
    shared: dict[str, Any] = {
        "dtypes": dtypes,
        "world_size": world,
        "micro_batch": options.per_device_train_batch_size,
    }
    # Evaluation alone needs no optimizer: a frozen engine that lives where the policy's parameters would.
    alone = plan_frozen(options, "", placement=placement_of(base), deepspeed=None, hidden_size=width, **shared)
    plan = EnginePlan(dtypes, policy, policy_config(options, base, dtypes, world, width), alone.ds_config, None)
    if reference is None:
        if options.ref_deepspeed is not None:
            raise OptionError(f"ref_deepspeed: {options.method} has no reference model; remove ref_deepspeed")
        return plan
    frozen = plan_frozen(
        options,
        "ref",
        placement=options.ref_placement,
        deepspeed=options.ref_deepspeed,
        hidden_size=_width(reference),
        **shared,
    )
    return replace(plan, reference=ReferencePlan(reference, policy, frozen, plan.compute))


def _width(source: ModelSource) -> int:
    return int(source.config.get_text_config().hidden_size)


def build_engine(
    model: PreTrainedModel,
    options: AlignmentConfig,
    ds_config: dict[str, Any],
    *,
    training_steps: int | None,
    optimizers: tuple[Any, Any] = (None, None),
    aux_loss: bool = False,
    architecture: Architecture = CAUSAL_LM,
) -> ScoringEngine:
    """Wrap a model in its engine and check once that its scores are its own.

    Args:
        model: loaded for ``ds_config``.
        options: the run's.
        ds_config: this engine's DeepSpeed configuration.
        training_steps: length of the schedule; None for a frozen engine.
        optimizers: the user's own optimizer and schedule, or Nones.
        aux_loss: compute the balancing loss of a mixture of experts.
        architecture: what the model is.
    """
    if options.disable_dropout:
        disable_dropout(model)
    if training_steps is None:
        return frozen_engine(model, ds_config, architecture, aux_loss)
    scorer = architecture.scorer(model, aux_loss)
    if options.gradient_checkpointing:
        enable_checkpointing(model, options.gradient_checkpointing_kwargs)
        scorer.one_pass = bool((options.gradient_checkpointing_kwargs or {}).get("use_reentrant"))
    optimizer = optimizers[0] or build_optimizer(scorer, options)
    scheduler = optimizers[1] or build_scheduler(optimizer, options, training_steps)
    return checked(PolicyEngine(scorer, ds_config, optimizer, scheduler), architecture)
