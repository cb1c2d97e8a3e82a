"""From a plan to engines: policy and reference, each with its own DeepSpeed configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from alignment.config.deepspeed import (
    frozen_config,
    load_deepspeed_config,
    placement_of,
    policy_config,
    reference_placement,
)
from alignment.config.dtypes import DtypePlan, plan_dtypes
from alignment.config.errors import OptionError
from alignment.config.options import AlignmentConfig
from alignment.engines.building import checked, frozen_engine
from alignment.engines.launch_env import world_size
from alignment.engines.optimization import build_optimizer, build_scheduler
from alignment.engines.scoring import PolicyEngine, ScoringEngine
from alignment.models.architecture import CAUSAL_LM, Architecture
from alignment.models.loading import disable_dropout, enable_checkpointing, snapshot
from alignment.models.source import ModelSource, widened


@dataclass(frozen=True)
class EnginePlan:
    """Dtypes and DeepSpeed configurations of policy and reference, decided before anything is loaded."""

    dtypes: DtypePlan
    policy: dict[str, Any]
    policy_frozen: dict[str, Any]
    reference: dict[str, Any] | None
    placement: str

    @property
    def compute(self) -> torch.dtype:
        """The dtype of weights and activations."""
        dtype: torch.dtype = getattr(torch, self.dtypes.compute)
        return dtype

    def describe(self, policy: ModelSource, reference: ModelSource) -> str:
        """One line for the start of a run: where policy and reference live, in which format, at what cost."""
        stage = self.policy["zero_optimization"]["stage"]
        formats = f"computing in {self.dtypes.compute}, {self.dtypes.master} masters"
        text = f"policy: {policy.name}, ZeRO stage {stage}, {formats}"
        if self.reference is None:
            return f"{text}; no reference model"
        size = torch.empty(0, dtype=self.compute).element_size()
        cost = {
            "replica": f"{size} bytes per parameter on every device",
            "sharded": f"{size} bytes per parameter, divided by {world_size()} rank(s), on the devices",
            "offload": f"{size} bytes per parameter, divided by {world_size()} rank(s), in host memory",
        }[self.placement]
        own = "the policy as given" if reference is policy else reference.name
        return f"{text}; reference: {own}, {self.placement} ({cost})"


def plan_engines(
    options: AlignmentConfig, policy: PretrainedConfig, reference_model: PretrainedConfig | None
) -> EnginePlan:
    """Build every DeepSpeed configuration of the run.

    Args:
        options: the run's.
        policy: the policy's configuration.
        reference_model: the reference's, which may be of another size; None for a method without one.

    Raises:
        OptionError: a key or value of the JSON files that DeepSpeed would ignore or that contradicts the options.
    """
    base = load_deepspeed_config(options.deepspeed, "zero2")
    dtypes = plan_dtypes(options, base)
    world, width = world_size(), policy.get_text_config().hidden_size
    placement = reference_placement(options) if reference_model is not None else "none"
    frozen: dict[str, Any] = {
        "options": options,
        "plan": dtypes,
        "world_size": world,
        "micro_batch": options.per_device_train_batch_size,
    }
    reference = None
    if reference_model is not None:
        own = None if options.ref_deepspeed is None else load_deepspeed_config(options.ref_deepspeed, "")
        reference_width = reference_model.get_text_config().hidden_size
        reference = frozen_config(base=own, placement=placement, hidden_size=reference_width, **frozen)
    elif options.ref_deepspeed is not None:
        raise OptionError(f"ref_deepspeed: {options.method} has no reference model; remove ref_deepspeed")
    # Evaluation alone needs no optimizer: a frozen engine that lives where the policy's parameters would.
    alone = frozen_config(base=None, placement=placement_of(base), hidden_size=width, **frozen)
    return EnginePlan(dtypes, policy_config(options, base, dtypes, world, width), alone, reference, placement)


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


def reference_model(
    source: ModelSource, policy: ModelSource, options: AlignmentConfig, plan: EnginePlan
) -> PreTrainedModel:
    """The reference: loaded from its own path, or a copy of the live policy taken before its engine exists."""
    assert plan.reference is not None
    if source is policy and policy.live is not None:
        return widened(snapshot(policy.live), plan.compute)
    return source.load(options, plan.compute, plan.reference)
