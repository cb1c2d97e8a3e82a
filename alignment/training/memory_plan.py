"""The memory plan of a run, and the changes with which it fits."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil

from alignment.config.deepspeed import load_deepspeed_config
from alignment.config.dtypes import Machine, planned, planning_for
from alignment.config.errors import AlignmentError, OptionError
from alignment.config.fields import AUTO
from alignment.config.options import AlignmentConfig
from alignment.config.options_online import OnlineOptions
from alignment.engines.memory import ranks_of_host
from alignment.engines.placement import placement_of
from alignment.models.adapters.skeleton import known_skeleton
from alignment.models.quantized import quantized
from alignment.models.source import ModelSource, model_source
from alignment.models.tasks import CLASSIFIER
from alignment.models.tiled_mlp import mlps_of
from alignment.planning.changes import Change, possible, sufficient
from alignment.planning.engines import EnginePlan, plan_engines
from alignment.planning.gpu_terms import usable_bytes
from alignment.planning.placing import smallest_card
from alignment.planning.plan import Frozen, MemoryPlan, NotPlanned
from alignment.planning.planner import Planner
from alignment.planning.table import GB, lines, verdict
from alignment.run.ranks import tell, world_size
from alignment.training.arguments import balancing_coefficient

if TYPE_CHECKING:
    from alignment.training.method import AnyMethod
    from alignment.training.preparation import PlannedModels

_SLICES = "tiled_mlp: auto computes MLPs in slices"


@dataclass
class RunPlan:
    """Plans the memory of a run, and of the run with other options.

    Args:
        options: its options.
        method: its method.
        policy: the policy's model.
        reference: the reference's model, or None.
        card: bytes of the smallest GPU that a process can use.
        memory: bytes of a host's memory.
        ranks: number of ranks, each with a GPU.
        hosts: number of hosts.
        tokens: tokens of the longest sequence; None: what the options allow.
        kernel: attention kernel.
        engines: the engine plan; None to make it.
        rewards: the reward models; None to take them from the options.
        peft_config: PEFT's configuration of the adapters, if the options do not describe them.
        mlp: name of the MLPs that are computed in slices because the plan says so, see :meth:`settled`.

    Raises:
        NotPlanned: by all attributes, if the model cannot be counted.
    """

    options: AlignmentConfig
    method: AnyMethod
    policy: ModelSource
    reference: ModelSource | None
    card: float
    memory: float = math.inf
    ranks: int = 1
    hosts: int = 1
    tokens: int | None = None
    kernel: str = "flash"
    engines: EnginePlan | None = None
    rewards: tuple[Frozen, ...] | None = None
    peft_config: Any = None
    mlp: str | None = None

    @functools.cached_property
    def planner(self) -> Planner:
        """The planner of these options."""
        engines = self.engines or self._changed_engines()
        if self.mlp is not None:
            engines = replace(engines, source=replace(engines.source, mlp=self.mlp))
        columns = 2 if isinstance(self.options, OnlineOptions) else max(1, len(self.method.completions))
        return Planner(
            self.options,
            engines,
            self.ranks,
            sequences=columns,
            referenced=columns * (2 if self.method.draws_partners else 1),
            hosts=self.hosts,
            rewards=self._rewards(engines) if self.rewards is None else self.rewards,
            kernel=self.kernel,
            aux_loss=balancing_coefficient(self.options, self.policy.config) is not None,
            card=self.card,
        )

    def _changed_engines(self) -> EnginePlan:
        """Plan engines without other ranks, which may be computing: as for another machine with the same GPUs."""
        with planning_for(Machine(self.ranks, cuda=True, reads_weights=False, card=self.card)):
            return plan_engines(self.options, self.policy, self.reference, copy.deepcopy(self.peft_config))

    @functools.cached_property
    def plan(self) -> MemoryPlan:
        """The plan, with as few recomputed layers as fit if the options leave that to the plan."""
        return self.planner.plan(self.tokens, self._recomputed)

    @functools.cached_property
    def tiled(self) -> RunPlan:
        """The plan with MLPs in slices if ``tiled_mlp`` leaves that to the plan and the model supports it."""
        if self.options.tiled_mlp != AUTO or self.mlp is not None:
            return self
        try:
            return replace(self, mlp=self._sliced.mlp)
        except OptionError:
            return self

    @functools.cached_property
    def _sliced(self) -> ModelSource:
        """The policy's model with MLPs in slices; raises OptionError if it does not support that."""
        found = self.policy.in_slices(self.options)
        if (skeleton := known_skeleton(self.policy)) is not None:
            mlps_of(skeleton, found.mlp)
        return found

    def settled(self) -> RunPlan:
        """Return the plan with MLPs in slices if that takes less memory, and the GPUs, equal on all ranks, need it."""
        fits = self.plan.peak(reserve=True) <= self.card
        return self if fits or self.tiled.plan.peak() >= self.plan.peak() else self.tiled

    @property
    def _recomputed(self) -> int | None:
        if self.options.gradient_checkpointing == "auto" and not self.options.activation_offloading:
            return self.planner.layers_to_recompute(self.card, self.tokens)
        return None

    @property
    def fits(self) -> bool:
        """Whether the run fits in the memory of each GPU and each host."""
        return self.plan.fits(self.card, self.memory)

    @functools.cached_property
    def longest(self) -> int:
        """The longest sequences that fit, in tokens; 0 if none do."""
        free = self.options.gradient_checkpointing == "auto"
        return self.tiled.planner.longest_that_fits(self.card, self.memory, self.plan.layers if free else None)

    @property
    def checkpointed_layers(self) -> int:
        """Number of decoder layers to recompute."""
        return self.plan.checkpointed

    @property
    def max_tokens(self) -> int | None:
        """Tokens of the largest micro-batch that fits; None if all rows of one do."""
        rows, each = self.options.per_device_train_batch_size, self.planner.sequences
        while rows > 1 and not self._with({"per_device_train_batch_size": rows}).fits:
            rows //= 2
        whole = rows == self.options.per_device_train_batch_size
        return None if whole else rows * each * self.plan.tokens

    def _with(self, changed: dict[str, Any]) -> RunPlan:
        """Return the plan of the same run with other options."""
        options = copy.copy(self.options)
        # The dtype of the GPUs of this run, which may not be the default of others.
        vars(options).update({"dtype": self.planner.engines.dtypes.compute, **changed})
        tokens, rewards = None if "max_length" in changed else self.tokens, self.rewards
        if rewards is not None and "reward_placement" in changed:
            rewards = tuple(replace(one, placement=changed["reward_placement"]) for one in rewards)
        policy, reference = self.policy, self.reference
        if changed.get("tiled_mlp") is True:
            policy = self._sliced
            if reference is not None:
                reference = policy if reference is self.policy else reference.in_slices(options)
        models: dict[str, Any] = {"policy": policy, "reference": reference, "rewards": rewards}
        return replace(self, options=options, engines=None, tokens=tokens, **models)

    def peak(self, phase: str) -> int:
        """Return the bytes on each GPU in a phase; 0 if the run has no such phase."""
        return self.plan.peak(phase) if phase in self.plan.gpu else 0

    @functools.cached_property
    def sufficient_changes(self) -> list[Change]:
        """Up to three changes of options, each of which makes the run fit."""
        stage = int(self.planner.engines.policy["zero_optimization"]["stage"])
        single = possible(self.options, stage, self.ranks, self.planner.engines.adapters is not None)
        return sufficient(
            list(single),
            self._changed,
            lambda plan: plan.fits(self.card, self.memory),
            lambda change: self._with(dict(change.options)).longest,
        )

    def lines(self) -> Iterator[str]:
        """Yield the plan as a table, the longest sequences that fit, and the changes with which the run fits."""
        yield from lines(self.plan, self.card, self.memory)
        if self.mlp is not None:
            yield _SLICES
        yield f"longest sequences that fit: {f'{self.longest} tokens' if self.longest else 'none'}"
        if not self.fits:
            found = self.changes()
            yield "with one of these it fits:" if found else "no change of options is known with which it fits"
            yield from (f"  {change}" for change in found)
        yield "Calculated; not confirmed on a GPU."

    def describe(self) -> str:
        """Return a line for the start of a run, with the changes if it does not fit."""
        text = f"memory plan: {verdict(self.plan, self.card, self.memory)}"
        if self.mlp is not None:
            text += f", {_SLICES}"
        if self.fits:
            return text
        return f"warning: {text}; with one of these it fits: {'; '.join(self.changes()) or 'no known change'}"

    def compared(self, phases: Mapping[str, Mapping[str, float]]) -> str:
        """Return the predicted and the measured peak of each phase, from the totals of phases."""
        found = (
            f"{name} {self.peak(name) / GB:.2f} and {phases[name]['peak_bytes'] / GB:.2f} GB"
            for name in self.plan.gpu
            if phases.get(name, {}).get("peak_bytes")
        )
        return f"predicted and measured: {', '.join(found)}"

    def changes(self) -> list[str]:
        """Return a line for each of :attr:`sufficient_changes`."""
        return [change.describe() for change in self.sufficient_changes]

    def _changed(self, change: Change) -> MemoryPlan | None:
        try:
            return self._with(dict(change.options)).plan
        except (AlignmentError, NotPlanned):
            return None  # the options contradict each other

    def _rewards(self, engines: EnginePlan) -> tuple[Frozen, ...]:
        options, path = self.options, getattr(self.options, "reward_model_path", None)
        if not isinstance(options, OnlineOptions) or path is None:
            return ()
        base = load_deepspeed_config(options.reward_deepspeed, f"ref_{options.reward_placement or 'offload'}")
        placement, source = placement_of(base), model_source(path, "reward_model_path", options, task=CLASSIFIER)
        source = quantized(
            source,
            options,
            key="reward_model_path",
            in_4bit=bool(options.reward_load_in_4bit),
            compute=engines.compute,
            stage=0 if placement == "replica" else 3,
        )
        rows = options.reward_batch_size or 2 * options.per_device_train_batch_size
        return (Frozen("reward model", source, placement, "score", rows),)


def plan_memory(
    options: AlignmentConfig, method: AnyMethod, models: PlannedModels, rewards: tuple[Frozen, ...], longest: int = 0
) -> RunPlan | None:
    """Plan the memory of a run. Collective.

    Args:
        options: its options.
        method: its method.
        models: its models.
        rewards: its reward models.
        longest: tokens of the longest sequence; 0 if it is not known.

    Returns:
        The plan; None without GPUs, or if the model cannot be counted.
    """
    machine = planned()
    if machine is None:
        card, memory = smallest_card(), float(psutil.virtual_memory().total)
    else:
        on_gpus = machine.cuda and not options.use_cpu
        card, memory = (machine.card or usable_bytes(24)) if on_gpus else None, math.inf
    if card is None:
        return None
    adapters = models.engines.adapters
    described = adapters is None or options.use_peft or adapters.path is not None
    run = RunPlan(
        options,
        method,
        models.policy,
        models.reference if method.needs_reference else None,
        card=card,
        memory=memory,
        ranks=world_size(),
        hosts=1 if machine is not None else max(1, world_size() // ranks_of_host()),
        tokens=longest if longest and not isinstance(options, OnlineOptions) else None,
        engines=models.engines,
        rewards=rewards,
        peft_config=None if described or adapters is None else adapters.config,
    )
    try:
        run = run.settled()
    except NotPlanned as error:
        tell(f"memory plan: {error}")
        return None
    if run.mlp is not None:
        models.engines = replace(models.engines, source=replace(models.engines.source, mlp=run.mlp))
    return run
