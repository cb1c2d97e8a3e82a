"""The engines of a run as they are planned: dtypes, DeepSpeed JSON, adapters, quantised weights, and the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from alignment.config.deepspeed import load_deepspeed_config, policy_config, source_of
from alignment.config.dtypes import DtypePlan, plan_dtypes, planned, uses_cuda
from alignment.config.errors import OptionError, setting
from alignment.config.options import AlignmentConfig
from alignment.config.options_online import OnlineOptions
from alignment.config.placement import PLACEMENTS, placement_of, plan_frozen
from alignment.config.translated.sections import check_translated, without_sections
from alignment.engines.collectives import gathered
from alignment.engines.launch_env import world_size
from alignment.models.adapters.given import Given
from alignment.models.adapters.plan import plan_adapters
from alignment.models.adapters.record import Adapters
from alignment.models.quantization import plan_quantization
from alignment.models.source import ModelSource
from alignment.planning.kernels import check_kernels
from alignment.planning.memory import Cards, census, smallest_card, use_of_policy
from alignment.references.adapter import AdapterReferencePlan
from alignment.references.engine import ReferencePlan


@dataclass(frozen=True)
class EnginePlan:
    """Dtypes and DeepSpeed configurations of policy and reference, decided before anything is loaded.

    Attributes:
        dtypes: the run's.
        source: the policy's model.
        adapters: what is trained of it; None for all of it.
        notes: what else there is to tell at the start.
        policy: JSON of the engine that trains it.
        policy_frozen: JSON of the engine that only evaluates it.
        reference: the reference; None for a method without one.
        cards: the GPUs, on which frozen models may be placed; None where there are none.
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
        """The dtype of weights and activations."""
        dtype: torch.dtype = getattr(torch, self.dtypes.compute)
        return dtype

    def works_in_host_memory(self, options: AlignmentConfig) -> bool:
        """Whether this process's threads have work to do: on a CPU, or where the policy is offloaded."""
        if planned() is not None:
            return False  # here nothing is trained
        zero = self.policy["zero_optimization"]
        offloaded = (zero.get(section, {}).get("device") for section in ("offload_optimizer", "offload_param"))
        return "cpu" in offloaded or not uses_cuda(options)

    def describe(self, given: Given | None = None) -> str:
        """One line for the start of a run: where policy and reference live, in which format, at what cost."""
        stage = self.policy["zero_optimization"]["stage"]
        formats = f"computing in {self.dtypes.compute}, {self.dtypes.master} masters"
        text = f"policy: {self.source.name}, ZeRO stage {stage}, {formats}"
        if self.source.quantization is not None:
            text += f", {self.source.quantization.describe()}"
        if self.adapters is not None:
            text += f", {self.adapters.describe()}"
        if self.reference is None:
            return f"{text}; no reference model"
        return f"{text}; {self.reference.describe(given)}"


def check_alike(plan: EnginePlan) -> None:
    """Refuse ranks that would compute in different formats, as hosts with different GPUs would; collective.

    And those that would train or save different weights, as hosts with different caches of the hub would.

    Raises:
        OptionError: on every rank, with the formats.
    """
    found = gathered(plan.dtypes.compute)
    if len({*found}) > 1:
        ranks = ", ".join(f"{dtype} on rank {found.index(dtype)}" for dtype in sorted({*found}))
        raise OptionError(f"dtype: the GPUs of this run choose different formats ({ranks}); set dtype for all of them")
    if plan.adapters is not None and len({*gathered((plan.adapters.trained, plan.adapters.head))}) > 1:
        raise OptionError(
            "model: hosts of this run differ in whether its checkpoint, in the hub's cache, has the head of a reward "
            "model; name the head in peft_config, or load the model from a folder that all of them share"
        )


def plan_engines(
    options: AlignmentConfig,
    policy: ModelSource,
    reference: ModelSource | None,
    peft_config: Any = None,
    live: Any = None,
) -> EnginePlan:
    """Build every DeepSpeed configuration of the run, and plan adapters and quantised weights.

    Args:
        options: the run's.
        policy: the policy's model.
        reference: the reference's, which may be of another size; None for a method without one.
        peft_config: PEFT's configuration of the adapters to train, in place of the options.
        live: the ``PeftModel`` that the policy's model was taken from, if it was.

    Raises:
        OptionError: a key or value of the JSON files that DeepSpeed would ignore or that contradicts the options; and
            adapters or quantised weights that cannot be had.
        ModelError: adapters that are not this model's.
    """
    own = reference is policy
    notes = check_kernels(options, (policy, None if own else reference))
    base = load_deepspeed_config(options.deepspeed, "zero2")
    check_translated(options, base, source_of(base))
    base = without_sections(base)
    dtypes = plan_dtypes(options, base)
    world, width = world_size(), _width(policy)
    shared: dict[str, Any] = {
        "dtypes": dtypes,
        "world_size": world,
        "micro_batch": options.per_device_train_batch_size,
    }
    # Evaluation alone needs no optimizer: a frozen engine that lives where the policy's parameters would.
    alone = plan_frozen(options, "", placement=placement_of(base), deepspeed=None, hidden_size=width, **shared)
    config = policy_config(options, base, dtypes, world, width)
    plan = EnginePlan(dtypes, policy, config, alone.ds_config, None, notes=tuple(notes))
    stage = int(config["zero_optimization"]["stage"])
    quantization = plan_quantization(
        options,
        policy.config,
        policy.init_kwargs,
        key=policy.name,
        in_4bit=options.load_in_4bit,
        in_8bit=options.load_in_8bit,
        live=policy.live is not None,
        compute=plan.compute,
        stage=stage,
    )
    policy = replace(policy, quantization=quantization)
    adapters = plan_adapters(
        options, policy, peft_config=peft_config, live=live, quantization=quantization, stage=stage
    )
    plan = replace(plan, source=policy, adapters=adapters)
    if reference is not None or isinstance(options, OnlineOptions):
        plan = replace(plan, cards=_cards(options, plan))
    return replace(plan, reference=_planned_reference(options, plan, reference, own, shared))


def _cards(options: AlignmentConfig, plan: EnginePlan) -> Cards | None:
    """The GPUs as training leaves them; None without any, or where the policy's size is not known. Collective."""
    card = smallest_card()
    trained = None if card is None else census(plan.source)
    if card is None or trained is None:
        return None
    ranks, quantization = world_size(), plan.source.quantization
    use = use_of_policy(
        options,
        trained,
        plan.policy,
        plan.dtypes,
        ranks=ranks,
        bits=None if quantization is None else quantization.bits,
        trained=None if plan.adapters is None else plan.adapters.trained,
    )
    return Cards(options, use, plan.compute.itemsize, ranks, card)


def _planned_reference(
    options: AlignmentConfig, plan: EnginePlan, reference: ModelSource | None, own: bool, shared: dict[str, Any]
) -> ReferencePlan | AdapterReferencePlan | None:
    """Where the reference's log-probs come from; ``own``: it is the policy as given."""
    policy, adapters, cards = plan.source, plan.adapters, plan.cards
    if reference is None:
        for name in ("ref_deepspeed", "ref_adapter_name"):
            if getattr(options, name) is not None:
                raise OptionError(f"{name}: {options.method} has no reference model; remove {name}")
        return None
    if _by_adapters(options, adapters, own):
        assert adapters is not None
        return AdapterReferencePlan(adapters)
    precomputed = options.ref_placement == "precomputed"
    asked = None if precomputed else options.ref_placement
    of_policy = None if plan.source.quantization is None else plan.source.quantization.bits
    bits = 4 if options.ref_load_in_4bit else of_policy if own and options.ref_load_in_4bit is None else None
    by_size, choice = asked is None and options.ref_deepspeed is None, None
    if by_size and cards is not None:
        choice = cards.place(reference, bits, alone=precomputed)
    frozen = plan_frozen(
        options,
        "ref",
        placement=asked if choice is None else choice.placement,
        deepspeed=options.ref_deepspeed,
        hidden_size=_width(reference),
        **shared,
    )
    if cards is not None and not by_size and not precomputed:
        cards.take(reference, bits, frozen.placement.name)
    as_policy = own and options.ref_load_in_4bit is None
    if own and options.ref_load_in_4bit is False:  # whole, however the policy is loaded
        kwargs = {name: value for name, value in reference.init_kwargs.items() if name != "quantization_config"}
        reference = replace(reference, init_kwargs=kwargs)
    quantization = plan_quantization(
        options,
        reference.config,
        reference.init_kwargs,
        key=policy.name if own else "ref_model_name_or_path",
        in_4bit=bool(options.ref_load_in_4bit) or (as_policy and options.load_in_4bit),
        in_8bit=as_policy and options.load_in_8bit,
        live=reference.live is not None,
        compute=plan.compute,
        stage=int(frozen.ds_config["zero_optimization"]["stage"]),
    )
    if options.ref_load_in_4bit is False and quantization is not None:
        raise OptionError(
            f"ref_load_in_4bit=False: the weights of {reference.name} are kept in {quantization.bits} bits already; "
            "leave it out"
        )
    given = adapters if own and adapters is not None and not adapters.are_new else None
    source = replace(reference, quantization=quantization)
    why = "" if choice is None else choice.why
    if by_size and planned() is not None and uses_cuda(options):
        why = "unless the GPUs of the run have room for it"
    return ReferencePlan(source, policy, frozen, plan.compute, precomputed, given, why)


def _by_adapters(options: AlignmentConfig, adapters: Adapters | None, own: bool) -> bool:
    """Whether the reference's log-probs come from the policy's own engine.

    Raises:
        OptionError: they are to, and cannot; or an option of the reference would have no effect.
    """
    asked = options.ref_placement
    if asked not in (None, "adapter") or (asked is None and (adapters is None or not own)):
        if options.ref_adapter_name is not None:
            raise OptionError(
                f"{setting('ref_adapter_name', options.ref_adapter_name)}: has no effect with "
                f"{setting('ref_placement', asked)}; leave one out"
            )
        return False
    if adapters is None:
        raise OptionError(
            "ref_placement='adapter': the whole model is trained, so nothing of it stays as it was; set use_peft: "
            f"true, or ref_placement to one of {', '.join(PLACEMENTS)}"
        )
    if not own:
        raise OptionError(
            "ref_placement='adapter': a reference model was given as well, which is not the policy; leave one out"
        )
    for name in ("ref_deepspeed", "ref_load_in_4bit"):
        value = getattr(options, name)
        if value is not None and asked is None:
            return False  # asks for an engine of its own
        if value is not None:
            raise OptionError(
                f"{setting(name, value)}: has no effect with ref_placement='adapter', which has no engine of its own; "
                "leave one out"
            )
    return True


def _width(source: ModelSource) -> int:
    return int(source.config.get_text_config().hidden_size)
