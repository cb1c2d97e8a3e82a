"""The engine plan of a run: dtypes, DeepSpeed JSON, adapters, quantization, and the placement of the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from alignment.config.deepspeed import load_deepspeed_config, policy_config
from alignment.config.dtypes import DtypePlan, plan_dtypes, planned, uses_cuda
from alignment.config.elsewhere import without_sections
from alignment.config.errors import OptionError, setting
from alignment.config.options import AlignmentConfig
from alignment.config.options_online import OnlineOptions
from alignment.engines.collectives import gathered
from alignment.engines.placement import PLACEMENTS, placement_of, plan_frozen
from alignment.models.adapters.injection import Given
from alignment.models.adapters.plan import plan_adapters
from alignment.models.adapters.record import Adapters
from alignment.models.adapters.skeleton import largest_layer
from alignment.models.quantized import quantized
from alignment.models.source import ModelSource
from alignment.planning.kernels import check_kernels
from alignment.planning.placing import Cards, smallest_card
from alignment.planning.plan import NotPlanned
from alignment.planning.planner import Planner
from alignment.references.adapter import AdapterReferencePlan
from alignment.references.engine import ReferencePlan
from alignment.run.ranks import world_size


@dataclass(frozen=True)
class EnginePlan:
    """Dtypes and DeepSpeed configurations of policy and reference, decided before any weights are loaded.

    Attributes:
        dtypes: dtypes of the run.
        source: the policy's model.
        adapters: the adapters to train; None to train the full model.
        notes: further lines to print at the start of the run.
        policy: JSON of the policy's training engine.
        policy_frozen: JSON of an engine that only evaluates the policy.
        reference: plan of the reference; None for a method without one.
        cards: the GPUs, for the placement of frozen models; None without GPUs.
    """

    dtypes: DtypePlan
    source: ModelSource
    policy: dict[str, Any]
    policy_frozen: dict[str, Any]
    reference: ReferencePlan | AdapterReferencePlan | None
    adapters: Adapters | None = None
    notes: tuple[str, ...] = ()
    cards: Cards | None = None

    @property
    def compute(self) -> torch.dtype:
        """Compute dtype of weights and activations."""
        dtype: torch.dtype = getattr(torch, self.dtypes.compute)
        return dtype

    def works_in_host_memory(self, options: AlignmentConfig) -> bool:
        """Whether this process needs CPU threads: on a CPU, or if the policy is offloaded."""
        if planned() is not None:
            return False  # nothing is trained in this process
        zero = self.policy["zero_optimization"]
        offloaded = (zero.get(section, {}).get("device") for section in ("offload_optimizer", "offload_param"))
        return "cpu" in offloaded or not uses_cuda(options)

    def describe(self, given: Given | None = None) -> str:
        """Return a line for the start of a run: placements, dtypes and memory of policy and reference."""
        stage = self.policy["zero_optimization"]["stage"]
        formats = f"compute dtype {self.dtypes.compute}, {self.dtypes.master} master weights"
        text = f"policy: {self.source.name}, ZeRO stage {stage}, {formats}"
        if self.source.quantization is not None:
            text += f", {self.source.quantization.describe()}"
        if self.adapters is not None:
            text += f", {self.adapters.describe()}"
        if self.reference is None:
            return f"{text}; no reference model"
        return f"{text}; {self.reference.describe(given)}"


def check_alike(plan: EnginePlan) -> None:
    """Check that all ranks have the same plan. Collective.

    Hosts with different GPUs may choose different compute dtypes.

    Raises:
        OptionError: on every rank, if the plans differ.
    """
    found = gathered(plan.dtypes.compute)
    if len({*found}) > 1:
        ranks = ", ".join(f"{dtype} on rank {found.index(dtype)}" for dtype in sorted({*found}))
        raise OptionError(f"dtype: the default differs between the GPUs of this run ({ranks}); set dtype explicitly")


def plan_engines(
    options: AlignmentConfig,
    policy: ModelSource,
    reference: ModelSource | None,
    peft_config: Any = None,
    live: Any = None,
) -> EnginePlan:
    """Build all DeepSpeed configurations of the run, and plan adapters and quantization.

    Args:
        options: options of the run.
        policy: the policy's model.
        reference: the reference's model, which may have another size; None for a method without one.
        peft_config: PEFT's configuration of the adapters to train, instead of the options.
        live: the ``PeftModel`` that the policy's model was taken from, if any.

    Raises:
        OptionError: a JSON key or value that DeepSpeed would ignore or that contradicts the options, or adapters or
            quantization that are not supported.
        ModelError: adapters that do not belong to this model.
    """
    own = reference is policy
    notes = check_kernels(options, (policy, None if own else reference))
    base = load_deepspeed_config(options.deepspeed, "zero2")
    base = without_sections(base)
    dtypes = plan_dtypes(options, base)
    world, width = world_size(), _width(policy)
    # Evaluation alone needs no optimizer: use a frozen engine with the placement of the policy's parameters.
    alone = plan_frozen(
        options,
        "",
        placement=placement_of(base),
        deepspeed=None,
        dtypes=dtypes,
        world_size=world,
        hidden_size=width,
        micro_batch=options.per_device_train_batch_size,
    )
    config = policy_config(options, base, dtypes, world, width)
    plan = EnginePlan(dtypes, policy, config, alone.ds_config, None, notes=tuple(notes))
    stage = int(config["zero_optimization"]["stage"])
    policy = quantized(
        policy,
        options,
        key=policy.name,
        in_4bit=options.load_in_4bit,
        in_8bit=options.load_in_8bit,
        compute=plan.compute,
        stage=stage,
    )
    adapters = plan_adapters(
        options, policy, peft_config=peft_config, live=live, quantization=policy.quantization, stage=stage
    )
    return with_reference(options, replace(plan, source=policy, adapters=adapters), reference, own)


def with_reference(
    options: AlignmentConfig,
    plan: EnginePlan,
    reference: ModelSource | None,
    own: bool,
    longest: int | None = None,
    sequences: int = 2,
) -> EnginePlan:
    """Place the reference on the GPUs. Collective.

    Args:
        options: options of the run.
        plan: the plan of the policy.
        reference: the reference's model; None for a method without one.
        own: whether it is the initial policy.
        longest: tokens of the longest sequence; None if the rows are unknown.
        sequences: sequences of a row that are trained on.

    Raises:
        OptionError: options of the reference that are not supported.
    """
    if reference is not None or isinstance(options, OnlineOptions):
        plan = replace(plan, cards=_cards(options, plan, longest, sequences))
    return replace(plan, reference=_planned_reference(options, plan, reference, own))


def _cards(options: AlignmentConfig, plan: EnginePlan, longest: int | None, sequences: int) -> Cards | None:
    """Return the GPUs with the memory that training uses; None without GPUs or if it is unknown. Collective."""
    card = smallest_card()
    if card is None:
        return None
    # With a card of 0 bytes, gradients are planned to take as little as they can, in favor of the frozen models.
    alone = replace(plan, reference=None, cards=None)
    planner = Planner(options, alone, world_size(), sequences=sequences, card=0)
    if plan.cards is not None:
        planner = replace(plan.cards.planner, sequences=sequences)  # with the models that it has built
    try:
        return Cards(planner, card, longest)
    except NotPlanned:
        return None


def _planned_reference(
    options: AlignmentConfig, plan: EnginePlan, reference: ModelSource | None, own: bool
) -> ReferencePlan | AdapterReferencePlan | None:
    """Plan the reference; ``own``: it is the initial policy."""
    policy, adapters, cards = plan.source, plan.adapters, plan.cards
    if reference is None:
        for name in ("ref_deepspeed", "ref_adapter_name"):
            if getattr(options, name) is not None:
                raise OptionError(f"{name}: {options.method} does not use a reference model; remove {name}")
        return None
    if _by_adapters(options, adapters, own):
        assert adapters is not None
        return AdapterReferencePlan(adapters)
    precomputed = options.ref_placement == "precomputed"
    asked = None if precomputed else options.ref_placement
    as_policy = own and options.ref_load_in_4bit is None
    if own and options.ref_load_in_4bit is False:  # not quantized, even if the policy is
        kwargs = {name: value for name, value in reference.init_kwargs.items() if name != "quantization_config"}
        reference = replace(reference, init_kwargs=kwargs)
    model: ModelSource = reference

    def at(stage: int) -> ModelSource:
        return quantized(
            model,
            options,
            key=policy.name if own else "ref_model_name_or_path",
            in_4bit=bool(options.ref_load_in_4bit) or (as_policy and options.load_in_4bit),
            in_8bit=as_policy and options.load_in_8bit,
            compute=plan.compute,
            stage=stage,
        )

    by_size, choice = asked is None and options.ref_deepspeed is None, None
    if by_size and cards is not None:
        choice = cards.place(at(stage=0), alone=precomputed)
    frozen = plan_frozen(
        options,
        "ref",
        placement=asked if choice is None else choice.placement,
        deepspeed=options.ref_deepspeed,
        hidden_size=_width(reference),
        dtypes=plan.dtypes,
        world_size=world_size(),
        micro_batch=options.per_device_train_batch_size,
        layer=largest_layer(at(stage=0), plan.compute),
    )
    source = at(int(frozen.ds_config["zero_optimization"]["stage"]))
    if cards is not None and not by_size and not precomputed:
        cards.take(source, frozen.placement.name)
    if options.ref_load_in_4bit is False and source.quantization is not None:
        raise OptionError(
            f"ref_load_in_4bit=False: {reference.name} is saved with {source.quantization.bits}-bit weights; remove it"
        )
    given = adapters if own and adapters is not None and not adapters.are_new else None
    why = "" if choice is None else choice.why
    if by_size and planned() is not None and uses_cuda(options):
        why = "unless it fits on the GPUs of the run"
    return ReferencePlan(source, policy, frozen, plan.compute, precomputed, given, why)


def _by_adapters(options: AlignmentConfig, adapters: Adapters | None, own: bool) -> bool:
    """Whether the policy's engine computes the reference's log-probs.

    Raises:
        OptionError: this is requested but not possible, or an option of the reference would have no effect.
    """
    asked = options.ref_placement
    if asked not in (None, "adapter") or (asked is None and (adapters is None or not own)):
        if options.ref_adapter_name is not None:
            raise OptionError(
                f"{setting('ref_adapter_name', options.ref_adapter_name)}: has no effect with "
                f"{setting('ref_placement', asked)}; remove one of them"
            )
        return False
    if adapters is None:
        raise OptionError(
            "ref_placement='adapter': requires adapters, but the full model is trained; set use_peft: true, or set "
            f"ref_placement to one of {', '.join(PLACEMENTS)}"
        )
    if not own:
        raise OptionError("ref_placement='adapter' and a reference model contradict each other; remove one of them")
    for name in ("ref_deepspeed", "ref_load_in_4bit"):
        value = getattr(options, name)
        if value is not None and asked is None:
            return False  # requests a separate engine
        if value is not None:
            raise OptionError(
                f"{setting(name, value)}: has no effect with ref_placement='adapter', which uses the policy's engine; "
                "remove one of them"
            )
    return True


def _width(source: ModelSource) -> int:
    return int(source.config.get_text_config().hidden_size)
