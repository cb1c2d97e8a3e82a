"""The memory plan of a run: the peak of each phase on a GPU and on a host, by part, from the configuration alone."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from alignment.config.deepspeed_keys import value_at
from alignment.config.dtypes import DtypePlan
from alignment.config.errors import first_line
from alignment.config.fields import keywords
from alignment.config.options import AlignmentConfig
from alignment.config.options_online import OnlineOptions
from alignment.engines.optimizers import step_bytes
from alignment.models.adapters.record import Adapters
from alignment.models.source import ModelSource
from alignment.planning.activations import Counting, Shape, Trend
from alignment.planning.engine_bytes import EngineBytes, Trained, engine_bytes
from alignment.planning.gpu_terms import CONTEXT, HOST_PROCESS, NCCL, RESERVE, page_locked
from alignment.planning.gradients import GradientPlan, candidates, micro_batches
from alignment.planning.weights import Weights, weights_of
from alignment.references.adapter import AdapterReferencePlan
from alignment.references.engine import ReferencePlan

PHASES = ("load", "rollout", "score", "reference", "train", "step", "save", "evaluate")
Parts = dict[str, float]
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STEP, _MOST = 64, 2**20  # tokens: resolution and limit of the longest sequences
_NEVER = 2**60  # bytes


class NotPlanned(Exception):
    """The memory of a run cannot be planned; the message says why."""


@dataclass(frozen=True)
class MemoryPlan:
    """Peaks of the phases of a run.

    Attributes:
        gpu: bytes on each GPU by phase and part.
        host: bytes on each host by phase and part.
        tokens: tokens of the longest sequence.
        checkpointed: number of decoder layers that are recomputed in the backward pass, of all.
        layers: number of decoder layers.
    """

    gpu: dict[str, Parts]
    host: dict[str, Parts]
    tokens: int
    checkpointed: int
    layers: int

    def peak(self, phase: str | None = None, *, reserve: bool = False) -> int:
        """Return the bytes on a GPU in a phase, or in the phase that needs the most."""
        total = max(_total(parts) for name, parts in self.gpu.items() if phase in (None, name))
        return int(total * (1 + RESERVE)) if reserve else int(total)

    def host_peak(self) -> int:
        """Return the bytes on a host in the phase that needs the most."""
        return int(max(map(_total, self.host.values())))

    def fits(self, card: float, memory: float = math.inf) -> bool:
        """Whether all phases fit in the memory of a GPU, with the reserve, and of a host."""
        return self.peak(reserve=True) <= card and self.host_peak() <= memory


def _total(parts: Mapping[str, float]) -> float:
    return sum(parts.values())


def added(*several: Mapping[str, float]) -> Parts:
    """Return the sums of parts with the same names, without empty ones."""
    total: Counter[str] = Counter()
    for parts in several:
        total.update(parts)  # type: ignore[arg-type]
    return {name: size for name, size in total.items() if size >= 1}


@dataclass(frozen=True)
class Frozen:
    """A model that only computes scores: a reference or a reward model.

    Attributes:
        name: ``reference`` or ``reward model``.
        source: the model, with its quantization.
        placement: where its weights are, see :mod:`alignment.engines.placement`.
        phase: the phase in which it computes.
        rows: sequences in a pass; None: those of a micro-batch.
        alone: whether it is released before training starts.
    """

    name: str
    source: ModelSource
    placement: str
    phase: str
    rows: int | None = None
    alone: bool = False


class Engines(Protocol):
    """The parts of an :class:`~alignment.planning.engines.EnginePlan` that memory depends on."""

    @property
    def dtypes(self) -> DtypePlan: ...

    @property
    def compute(self) -> torch.dtype: ...

    @property
    def source(self) -> ModelSource: ...

    @property
    def policy(self) -> dict[str, Any]: ...

    @property
    def adapters(self) -> Adapters | None: ...

    @property
    def reference(self) -> ReferencePlan | AdapterReferencePlan | None: ...


@dataclass
class Planner:
    """Plans the memory of a run.

    Args:
        options: options of the run.
        engines: its engine plan.
        ranks: number of ranks, each with a GPU.
        sequences: sequences of a row that are trained on: 2 for pairs.
        referenced: sequences of a row that the reference scores.
        hosts: number of hosts.
        rewards: its reward models.
        kernel: attention kernel, see :data:`~alignment.planning.stand_in.KERNELS`.
        aux_loss: whether a load-balancing loss is computed.
        scored: largest share of a sequence's tokens that is scored.
        card: bytes of the smallest GPU, in which gradients are accumulated in the first way that fits; by default, all
            do.
    """

    options: AlignmentConfig
    engines: Engines
    ranks: int
    sequences: int = 2
    referenced: int = 2
    hosts: int = 1
    rewards: tuple[Frozen, ...] = ()
    kernel: str = "flash"
    aux_loss: bool = False
    scored: float = 1.0
    card: float = math.inf
    # By the id of the model, which is kept so that the id stays unique.
    _countings: dict[int, tuple[ModelSource, Counting]] = field(default_factory=dict)
    _weights: dict[int, tuple[ModelSource, Weights | None]] = field(default_factory=dict)

    @functools.cached_property
    def weights(self) -> Weights | None:
        """The weights of the policy."""
        plan = self.engines
        return weights_of(plan.source, plan.compute, plan.adapters, trained=True)

    @property
    def frozen(self) -> tuple[Frozen, ...]:
        """The models that only compute scores."""
        plan = self.engines.reference
        if not isinstance(plan, ReferencePlan):
            return self.rewards
        reference = Frozen("reference", plan.source, plan.frozen.placement.name, "reference", alone=plan.precomputed)
        return (reference, *self.rewards)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the options and the model allow."""
        positions = int(getattr(self.engines.source.config.get_text_config(), "max_position_embeddings", 0) or 0)
        return int(getattr(self.options, "max_length", None) or 0) or positions or 4096

    def plan(self, tokens: int | None = None, checkpointed: int | None = None, *, brief: bool = False) -> MemoryPlan:
        """Return the plan for sequences of up to ``tokens`` tokens.

        Args:
            tokens: tokens of the longest sequence; None: what the options allow.
            checkpointed: number of recomputed layers; None: what the options say, ``auto`` being all.
            brief: leave out passes without gradients over a micro-batch of training, which never need the most.

        Raises:
            NotPlanned: the model cannot be counted.
        """
        return self._assembly(self.gradients(tokens), tokens, checkpointed, brief).plan()

    def gradients(self, tokens: int | None = None) -> GradientPlan | None:
        """Return how gradients are accumulated over a window; None if there is nothing to choose.

        This is the first of :func:`candidates` with which training fits in the card, or the one that needs the least.
        It does not depend on the number of recomputed layers that ``auto`` chooses.
        """
        zero = self.engines.policy["zero_optimization"]
        offloaded = value_at(zero, "offload_optimizer.device") == "cpu"
        found = candidates(self.engines.dtypes, int(zero["stage"]), self.ranks, offloaded=offloaded)
        if micro_batches(self.options) == 1 or not found:
            return None
        try:
            chosen = found[0]
            if self.card < math.inf:
                needed = {one: self._assembly(one, tokens).training() for one in found}
                least = min(found, key=needed.__getitem__)
                chosen = next((one for one in found if needed[one] <= self.card), least)
            return replace(chosen, device_bytes=self._assembly(chosen, tokens).engine.gradients)
        except NotPlanned:
            return found[0 if self.card == math.inf else -1]

    def _assembly(
        self,
        gradients: GradientPlan | None,
        tokens: int | None,
        checkpointed: int | None = None,
        brief: bool = False,
    ) -> _Assembly:
        weights = self.weights
        if weights is None or not weights.layers:
            raise NotPlanned(f"the decoder layers of {self.engines.source.name} cannot be counted")
        if checkpointed is None:
            checkpointed = weights.layers if self.options.gradient_checkpointing else 0
        return _Assembly(self, weights, tokens or self.longest, checkpointed, gradients, brief)

    def longest_that_fits(self, card: float, memory: float = math.inf, checkpointed: int | None = None) -> int:
        """Return the longest sequences that fit, within 2 %, a multiple of 64 tokens; 0 if none do.

        Memory grows almost linearly with tokens, so that a few plans are sufficient.
        """

        def needed(tokens: int) -> tuple[int, int]:
            plan = self.plan(tokens, checkpointed, brief=True)
            return tokens, plan.peak(reserve=True) if plan.host_peak() <= memory else _NEVER

        positions = int(getattr(self.engines.source.config.get_text_config(), "max_position_embeddings", 0) or 0)
        most = min(_MOST, positions // _STEP * _STEP or _MOST)
        low, high, fitting = needed(1024), needed(4096), 0
        for _ in range(8):
            growth = max(1, high[1] - low[1]) / max(1, high[0] - low[0])
            guess = int(high[0] + (card - high[1]) / growth) // _STEP * _STEP
            guess = min(max(guess, _STEP), most)
            if guess in (low[0], high[0]):
                break
            low, high = sorted([high, needed(guess)])
            found = low if low[0] == guess else high
            if found[1] <= card:
                fitting = max(fitting, guess)
            if 0.98 * card <= found[1] <= card or guess in (_STEP, most):
                break
        return fitting

    def layers_to_recompute(self, card: float, tokens: int | None = None) -> int:
        """Return the smallest number of recomputed layers with which the run fits; all of them if it never does."""
        low, high = 0, self.plan(tokens, 0, brief=True).layers
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.plan(tokens, middle, brief=True).fits(card) else (middle + 1, high)
        return low

    def activations(self, source: ModelSource, shape: Shape, **how: Any) -> tuple[Trend, Trend]:
        """Return the peaks of a pass of the policy, or of a frozen model; see :class:`Counting`."""
        try:
            return self._counting(source)(shape, **how)
        except Exception as error:  # of many classes, from the model's own code
            why = f"{source.name} cannot be computed on tensors without values: {first_line(error)}"
            raise NotPlanned(why) from error

    @property
    def _shares(self) -> bool:
        """Whether sequences of a row share their prompt."""
        return self.options.pack != "false" and self.sequences > 1 and not self.aux_loss

    def weights_of(self, source: ModelSource) -> Weights | None:
        """Return the weights of a frozen model."""
        if id(source) not in self._weights:
            self._weights[id(source)] = source, weights_of(source, self.engines.compute)
        return self._weights[id(source)][1]

    def _counting(self, source: ModelSource) -> Counting:
        """Return the stand-ins of a model, which are kept for further shapes."""
        if id(source) not in self._countings:
            options, policy = self.options, source is self.engines.source
            arguments = {"use_reentrant": False} | dict(keywords(options.gradient_checkpointing_kwargs))
            made = Counting(
                source,
                self.engines.adapters if policy else None,
                self.engines.compute,
                self.kernel,
                checkpointing=arguments,
                shared=policy and self._shares,
                dropout=not options.disable_dropout,
                aux_loss=self.aux_loss and policy,
            )
            self._countings[id(source)] = source, made
        return self._countings[id(source)][1]


@dataclass
class _Assembly:
    """Adds up the parts of each phase."""

    planner: Planner
    weights: Weights
    tokens: int
    checkpointed: int
    gradients: GradientPlan | None
    brief: bool = False

    def training(self) -> float:
        """Return the bytes on a GPU that training needs, with the reserve."""
        return max(_total(added(parts, self._context)) for parts in (self._train(), self._step())) * (1 + RESERVE)

    def plan(self) -> MemoryPlan:
        gpu = {"load": self._load(), "train": self._train(), "step": self._step(), "save": self._save()}
        if not self.brief or self._evaluated.sequences > self._trained.sequences:
            gpu["evaluate"] = self._scoring(self._evaluated)
        if isinstance(self.planner.options, OnlineOptions):
            gpu["rollout"] = self._rollout()
        for model in self.planner.frozen:
            gpu[model.phase] = self._frozen(model)
        if isinstance(self.planner.engines.reference, AdapterReferencePlan):
            gpu["reference"] = self._scoring(self._referenced, stats=False)
        gpu = {name: added(gpu[name], self._context) for name in PHASES if name in gpu}
        host = {name: self._host(name) for name in gpu}
        return MemoryPlan(gpu, host, self.tokens, self.checkpointed, self.weights.layers)

    # Shapes ---------------------------------------------------------------------------------------------------------

    def _shape(self, rows: int, each: int) -> Shape:
        sequences, budget = rows * each, self.planner.options.max_tokens_per_batch
        if budget is not None:
            sequences = min(sequences, max(each, budget // self.tokens))
        return Shape(sequences, self.tokens, max(1, int(sequences * (self.tokens - 1) * self.planner.scored)))

    @functools.cached_property
    def _trained(self) -> Shape:
        return self._shape(self.planner.options.per_device_train_batch_size, self.planner.sequences)

    @functools.cached_property
    def _referenced(self) -> Shape:
        return self._shape(self.planner.options.per_device_train_batch_size, self.planner.referenced)

    @functools.cached_property
    def _evaluated(self) -> Shape:
        options = self.planner.options
        return self._shape(
            options.per_device_eval_batch_size or options.per_device_train_batch_size, self.planner.sequences
        )

    # Engines --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _config(self) -> dict[str, Any]:
        return self.planner.engines.policy

    @functools.cached_property
    def _stage(self) -> int:
        return int(self._config["zero_optimization"]["stage"])

    @functools.cached_property
    def _context(self) -> Parts:
        if self.planner.kernel == "cpu":
            return {}
        return {"CUDA context": CONTEXT, "NCCL": NCCL if self.planner.ranks > 1 else 0}

    @functools.cached_property
    def engine(self) -> EngineBytes:
        """What the policy's engine allocates."""
        options, dtypes, gradients = self.planner.options, self.planner.engines.dtypes, self.gradients
        accumulate = dtypes.accumulate if gradients is None else gradients.accumulate
        trained = Trained(
            numel=self.weights.trained,
            widest=self.weights.widest if self.planner.engines.adapters is None else 0,
            itemsize=self.planner.engines.compute.itemsize,
            states=step_bytes(options),
            master=_BYTES[dtypes.master],
            accumulated=_BYTES[accumulate] if micro_batches(options) > 1 else None,
            once=gradients is not None and gradients.once,
        )
        return engine_bytes(self._config, trained, self.planner.ranks)

    def _offloaded(self, what: str) -> bool:
        section = {"optimizer": "offload_optimizer", "weights": "offload_param"}[what]
        return value_at(self._config, f"zero_optimization.{section}.device") == "cpu"

    @functools.cached_property
    def _policy(self) -> Parts:
        """Weights of the policy that are always on a GPU."""
        if self._stage < 3:
            return self.weights.parts()
        return {} if self._offloaded("weights") else self.weights.parts(1 / self.planner.ranks)

    def _live(self, weights: Weights, config: dict[str, Any], ranks: int) -> Parts:
        """Weights that ZeRO-3 has gathered at the same time: those of a layer, and what is fetched in advance."""
        zero = config["zero_optimization"]
        offloaded = value_at(config, "zero_optimization.offload_param.device") == "cpu"
        if int(zero["stage"]) < 3 or (ranks == 1 and not offloaded):
            return {}
        each = weights.base / weights.numel
        ahead = min(weights.numel, int(zero.get("stage3_prefetch_bucket_size") or 0))
        return {"gathered layers": each * min(weights.numel, max(weights.layer, weights.widest) + ahead)}

    @functools.cached_property
    def _others(self) -> Parts:
        """Frozen models that are on a GPU at all times."""
        return added(*(self._placed(model) for model in self.planner.frozen if not model.alone))

    def _placed(self, model: Frozen) -> Parts:
        weights = self.planner.weights_of(model.source)
        return {model.name: 0.0 if weights is None else weights.placed(model.placement, self.planner.ranks)}

    @functools.cached_property
    def _always(self) -> Parts:
        return added(self._policy, self.engine.resident, self._others)

    # Phases ---------------------------------------------------------------------------------------------------------

    def _load(self) -> Parts:
        """The weights and, while the engine is built, their fp32 masters; or a layer that is being quantized."""
        weights, compute = self.weights, self.planner.engines.compute.itemsize
        held = weights.parts() if self._stage < 3 or weights.packed else self._policy
        read = {"reading": weights.widest_packed * compute}
        masters = {name: size for name, size in self.engine.resident.items() if name == "master weights"}
        if self.planner.kernel == "cpu" and self._stage in (1, 2):  # flattened in host memory, which is the same here
            masters["flattened"] = weights.trained * compute
        return added(held, max(read, masters, key=_total), self._others)

    def _train(self) -> Parts:
        """The peak with most activations, with most gradients, or while gradients are reduced."""
        source, layers, k = self.planner.engines.source, self.weights.layers, self.checkpointed
        count = functools.partial(
            self.planner.activations, source, self._trained, gradients=True, kept=self.engine.kept
        )
        moments: list[Parts] = []
        if k > 0:
            first, last = count(recomputed=True)
            moments += [first.of(k), last.of(layers)]
        if k < layers:
            plain, last = count()
            # The first k layers only keep their inputs.
            moments.append(added(plain.of(layers - k), {"layers": sum(first.each.values()) * k if k else 0}))
            moments += [] if k else [last.of(layers)]
        live = self._live(self.weights, self._config, self.planner.ranks)
        return max(
            *(added(self._always, self.engine.begun, live, moment) for moment in moments),
            added(self._always, self.engine.complete, live),
            key=_total,
        )

    def _step(self) -> Parts:
        return added(self._always, self.engine.step)

    def _save(self) -> Parts:
        return added(
            self._always,
            {"gathered layers": self.weights.widest * self.planner.engines.compute.itemsize}
            if self._stage == 3
            else {},
        )

    def _scoring(self, shape: Shape, stats: bool = True) -> Parts:
        """A pass of the policy without gradients."""
        trend, _ = self.planner.activations(self.planner.engines.source, shape, gradients=False, stats=stats)
        live = self._live(self.weights, self._config, self.planner.ranks)
        return added(self._always, live, trend.of(self.weights.layers))

    def _frozen(self, model: Frozen) -> Parts:
        weights = self.planner.weights_of(model.source)
        shape = self._referenced if model.rows is None else self._shape(model.rows, 1)
        if weights is None:
            return self._always
        trend, _ = self.planner.activations(model.source, shape, gradients=False, stats=False)
        held = added(self._placed(model)) if model.alone else self._always
        live = (
            {}
            if model.placement == "replica"
            else self._live(weights, self._zero3(model.placement), self.planner.ranks)
        )
        return added(held, live, trend.of(weights.layers))

    @staticmethod
    def _zero3(placement: str) -> dict[str, Any]:
        offload = {"offload_param": {"device": "cpu"}} if placement == "offload" else {}
        return {"zero_optimization": {"stage": 3, **offload}}

    def _rollout(self) -> Parts:
        from alignment.rollout.memory import completion_bytes  # imports generation, which other methods do not need

        options = self.planner.options
        assert isinstance(options, OnlineOptions)
        config, rows = self.planner.engines.source.config, options.rollout_batch_size or 2
        gathered = 0.0
        if self._stage == 3:
            whole = options.ds3_gather_for_generation is not False
            gathered = (
                self.weights.base
                if whole
                else sum(self._live(self.weights, self._config, self.planner.ranks).values())
            )
        cache = rows * completion_bytes(config, self.planner.engines.compute.itemsize, options.max_length)
        return added(self._always, {"gathered layers": gathered, "KV cache": cache})

    def _host(self, phase: str) -> Parts:
        """Bytes on a host, of all its ranks."""
        here = -(-self.planner.ranks // self.planner.hosts)
        parts: Parts = {"processes": HOST_PROCESS}
        parts |= self.engine.host
        if self._stage == 3 and self._offloaded("weights"):
            parts["weights"] = page_locked(self.weights.base / self.planner.ranks)
        for model in self.planner.frozen:
            weights = self.planner.weights_of(model.source)
            if model.placement == "offload" and weights is not None:
                parts[model.name] = page_locked(weights.base / self.planner.ranks)
        parts = {name: size * here for name, size in parts.items()}
        if phase == "save" and self._stage == 3:
            parts["gathered weights"] = (
                self.weights.base if self.planner.engines.adapters is None else self.weights.adapters
            )
        return added(parts)
