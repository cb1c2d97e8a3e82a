"""The memory of each phase of a run, by part."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from alignment.config.deepspeed_keys import value_at
from alignment.config.options_online import OnlineOptions
from alignment.engines.memory import page_locked
from alignment.engines.offloading import PENDING
from alignment.engines.optimizers import GROUP, step_bytes
from alignment.planning.activations import Shape
from alignment.planning.engine_bytes import EngineBytes, Trained, engine_bytes
from alignment.planning.gpu_terms import CONTEXT, HOST_PROCESS, NCCL, RESERVE
from alignment.planning.gradients import GradientPlan, micro_batches
from alignment.planning.plan import PHASES, Frozen, MemoryPlan, Parts, added, total
from alignment.planning.planned_run import PlannedRun
from alignment.planning.weights import Weights
from alignment.references.adapter import AdapterReferencePlan

_LIVE = 10**9  # DeepSpeed's default for stage3_max_live_parameters
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass
class Phases:
    """Adds up the parts of each phase of a run.

    Args:
        run: the run.
        weights: the weights of its policy.
        tokens: tokens of the longest sequence.
        checkpointed: number of recomputed layers.
        gradients: how gradients are accumulated; None if there is nothing to choose.
        brief: see :meth:`~alignment.planning.planner.Planner.plan`.
    """

    run: PlannedRun
    weights: Weights
    tokens: int
    checkpointed: int
    gradients: GradientPlan | None
    brief: bool = False

    def training(self) -> float:
        """Return the bytes on a GPU that training needs, with the reserve."""
        context = added(self._context, self._server("train"))
        return max(total(added(parts, context)) for parts in (self._train(), self._step())) * (1 + RESERVE)

    def plan(self) -> MemoryPlan:
        """Return the plan of all phases."""
        gpu = {"load": self._load(), "train": self._train(), "step": self._step(), "save": self._save()}
        if not self.brief or self._evaluated.sequences > self._trained.sequences:
            gpu["evaluate"] = self._scoring(self._evaluated)
        if isinstance(self.run.options, OnlineOptions):
            gpu["rollout"] = self._rollout()
        for model in self.run.frozen:
            gpu[model.phase] = max(gpu.get(model.phase, {}), self._frozen(model), key=total)
        if isinstance(self.run.engines.reference, AdapterReferencePlan):
            gpu["reference"] = self._scoring(self._referenced(), stats=False)
        together = self._together(gpu)
        gpu = {name: added(gpu[name], self._context, self._server(name)) for name in PHASES if name in gpu}
        host = {name: self._host(name) for name in gpu}
        return MemoryPlan(gpu, host, self.tokens, self.checkpointed, self.weights.layers, together)

    def _together(self, gpu: dict[str, Parts]) -> int:
        """Merge the micro-batches of the reference as long as other phases need as much; return how many at a time."""
        count, most = micro_batches(self.run.options), max(total(gpu[name]) for name in gpu if name != "reference")
        model = next((each for each in self.run.frozen if each.phase == "reference"), None)
        if self.brief or count == 1 or model is None or model.alone or model.placement == "replica":
            return 1
        parts = functools.partial(self._frozen, model)
        least, whole = total(parts(1)), total(parts(count))
        together = count
        if whole > max(least, most):
            together = max(1, int(1 + (count - 1) * (most - least) / (whole - least)))
        while together > 1 and total(parts(together)) > most:
            together -= 1
        together = -(-count // -(-count // together))  # passes of about the same size
        gpu["reference"] = parts(together)
        return together

    # Shapes ---------------------------------------------------------------------------------------------------------

    def _shape(self, rows: int, each: int, together: int = 1) -> Shape:
        sequences, budget = rows * each, self.run.options.max_tokens_per_batch
        if budget is not None:
            sequences = min(sequences, max(each, budget // self.tokens))
        sequences *= together
        return Shape(sequences, self.tokens, max(1, sequences * (self.tokens - 1)))

    @functools.cached_property
    def _trained(self) -> Shape:
        return self._shape(self.run.options.per_device_train_batch_size, self.run.sequences)

    def _referenced(self, together: int = 1) -> Shape:
        return self._shape(self.run.options.per_device_train_batch_size, self.run.referenced, together)

    @functools.cached_property
    def _evaluated(self) -> Shape:
        options = self.run.options
        rows = options.per_device_eval_batch_size or options.per_device_train_batch_size
        return self._shape(rows, self.run.sequences)

    # Engines --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _config(self) -> dict[str, Any]:
        return self.run.engines.policy

    @functools.cached_property
    def _stage(self) -> int:
        return int(self._config["zero_optimization"]["stage"])

    @functools.cached_property
    def _context(self) -> Parts:
        if self.run.kernel == "cpu":
            return {}
        return {"CUDA context": CONTEXT, "NCCL": NCCL if self.run.ranks > 1 else 0}

    @functools.cached_property
    def engine(self) -> EngineBytes:
        """What the policy's engine allocates."""
        options, dtypes, gradients = self.run.options, self.run.engines.dtypes, self.gradients
        accumulate = dtypes.accumulate if gradients is None else gradients.accumulate
        trained = Trained(
            numel=self.weights.trained,
            widest=self.weights.widest if self.run.engines.adapters is None else 0,
            group=min(self.weights.trained, max(GROUP, self.weights.widest)),
            itemsize=self.run.engines.compute.itemsize,
            states=step_bytes(options),
            master=_BYTES[dtypes.master],
            accumulated=_BYTES[accumulate] if micro_batches(options) > 1 else None,
            once=gradients is not None and gradients.once,
        )
        return engine_bytes(self._config, trained, self.run.ranks)

    @functools.cached_property
    def _offloaded(self) -> bool:
        """Whether the policy's weights are in host memory."""
        return value_at(self._config, "zero_optimization.offload_param.device") == "cpu"

    @functools.cached_property
    def _policy(self) -> Parts:
        """Weights of the policy that are always on a GPU."""
        if self._stage < 3:
            return self.weights.parts()
        return {} if self._offloaded else self.weights.parts(1 / self.run.ranks)

    def _gathered(self, weights: Weights, numel: float, *, offloaded: bool) -> Parts:
        """Weights that ZeRO-3 gathers at the same time, ``numel`` of them or all."""
        if self.run.ranks == 1 and not offloaded:
            return {}
        return {"gathered layers": weights.base * min(1, numel / weights.numel)}

    def _live(self, ahead: bool = True) -> Parts:
        """Weights of the policy that are gathered at the same time, by default with those that are fetched ahead."""
        if self._stage < 3:
            return {}
        weights = self.weights
        most = int(value_at(self._config, "zero_optimization.stage3_max_live_parameters") or _LIVE) if ahead else 0
        numel = max(weights.layer, min(most, weights.layer * weights.layers) + weights.widest)
        return self._gathered(weights, numel, offloaded=self._offloaded)

    @functools.cached_property
    def _alternating(self) -> bool:
        """Whether different passes of the policy follow each other."""
        several = self.run.referenced > self.run.sequences or isinstance(self.run.options, OnlineOptions)
        return several or isinstance(self.run.engines.reference, AdapterReferencePlan)

    @functools.cached_property
    def _others(self) -> Parts:
        """Frozen models that are on a GPU at all times."""
        return added(*(self._placed(model) for model in self.run.frozen if not model.alone))

    def _placed(self, model: Frozen) -> Parts:
        weights = self.run.weights_of(model.source)
        return {model.name: 0.0 if weights is None else weights.placed(model.placement, self.run.ranks)}

    @functools.cached_property
    def _always(self) -> Parts:
        return added(self._policy, self.engine.resident, self._others)

    # Phases ---------------------------------------------------------------------------------------------------------

    def _load(self) -> Parts:
        """The weights and, while the engine is built, their fp32 masters; or a layer that is being quantized."""
        weights, compute = self.weights, self.run.engines.compute.itemsize
        held = weights.parts() if self._stage < 3 or weights.packed else self._policy
        read = {"reading": weights.read * compute}
        masters = {name: size for name, size in self.engine.resident.items() if name == "master weights"}
        if self.run.kernel == "cpu" and self._stage in (1, 2):  # flattened in host memory, which is the same here
            masters["flattened"] = weights.trained * compute
        return added(held, max(read, masters, key=total), self._others)

    def _train(self) -> Parts:
        """The peak with most activations, with most gradients, or while gradients are reduced."""
        source, layers, k = self.run.engines.source, self.weights.layers, self.checkpointed
        count = functools.partial(self.run.activations, source, self._trained, gradients=True, kept=self.engine.kept)
        moments: list[Parts] = []
        if k > 0:
            first, last = count(recomputed=True)
            moved = -self._hidden * max(0, k - PENDING) if self.run.options.activation_offloading else 0
            moments += [added(first.of(k), {"layers": moved}), last.of(layers)]
        if k < layers:
            plain, last = count()
            # The first k layers only keep their inputs.
            moments.append(added(plain.of(layers - k), {"layers": sum(first.each.values()) * k if k else 0}))
            moments += [] if k else [last.of(layers)]
        # DeepSpeed fetches ahead from the third of equal passes in a row.
        live = self._live(ahead=not self._alternating or micro_batches(self.run.options) > 2)
        return max(
            *(added(self._always, self.engine.begun, live, moment) for moment in moments),
            added(self._always, self.engine.complete, live),
            key=total,
        )

    @property
    def _hidden(self) -> float:
        """The hidden states that a recomputed layer saves of a micro-batch."""
        width = self.run.engines.source.config.get_text_config().hidden_size
        return float(self._trained.sequences * self.tokens * width * self.run.engines.compute.itemsize)

    def _step(self) -> Parts:
        return added(self._always, self.engine.step)

    def _save(self) -> Parts:
        """At stage 3, weights are gathered one after another."""
        widest = self.weights.widest * self.run.engines.compute.itemsize
        return added(self._always, {"gathered layers": widest if self._stage == 3 else 0})

    def _scoring(self, shape: Shape, stats: bool = True) -> Parts:
        """A pass of the policy without gradients."""
        peaks = self.run.activations(self.run.engines.source, shape, gradients=False, stats=stats)
        decoder, head = (trend.of(self.weights.layers) for trend in peaks)
        # After equal passes, DeepSpeed keeps weights for the next one while the head computes.
        moments = added(self._live(), decoder), added(self._live(ahead=not self._alternating), head)
        return added(self._always, max(moments, key=total))

    def _frozen(self, model: Frozen, together: int = 1) -> Parts:
        """A pass of a reference, over this many micro-batches, or of a reward model."""
        weights = self.run.weights_of(model.source)
        shape = self._referenced(together) if model.rows is None else self._shape(model.rows, 1)
        if weights is None:
            return self._always
        peaks = self.run.activations(model.source, shape, gradients=False, stats=False)
        peak = max((trend.of(weights.layers) for trend in peaks), key=total)
        held, live = added(self._placed(model)) if model.alone else self._always, Parts()
        if model.placement != "replica":
            # A layer that computes, and the next one or a wider weight that is being fetched.
            numel = weights.layer + max(weights.layer, weights.widest)
            live = self._gathered(weights, numel, offloaded=model.placement == "offload")
        return added(held, live, peak)

    def _rollout(self) -> Parts:
        from alignment.rollout.memory import completion_bytes  # imports generation, which other methods do not need

        options = self.run.options
        assert isinstance(options, OnlineOptions)
        if self._uses_vllm:
            return self._save()  # weights are gathered one after another to be sent
        config, rows = self.run.engines.source.config, options.rollout_batch_size or 2
        whole = self._stage == 3 and options.ds3_gather_for_generation is not False
        gathered = {"gathered layers": float(self.weights.base)} if whole else self._live()
        lengths = {"context": self.tokens, "prompt": max(1, self.tokens - options.max_new_tokens)}
        cache = rows * completion_bytes(config, self.run.engines.compute.itemsize, **lengths)
        return added(self._always, gathered, {"KV cache": cache})

    def _server(self, phase: str) -> Parts:
        """What a colocated vLLM server allocates: its share, or only the context of its process while it sleeps."""
        options = self.run.options
        if not self._uses_vllm or not isinstance(options, OnlineOptions) or options.vllm_mode != "colocate":
            return {}
        from alignment.rollout.vllm.command import memory_share, sleeps

        if phase != "rollout" and sleeps(options):
            return {"vLLM server": CONTEXT}
        share = (memory_share(options) or 0) * self.run.card if self.run.card < math.inf else 0
        return {"vLLM server": max(share, self._unpacked + CONTEXT)}

    @property
    def _uses_vllm(self) -> bool:
        return isinstance(self.run.options, OnlineOptions) and self.run.options.rollout_backend == "vllm"

    @property
    def _unpacked(self) -> float:
        """Bytes of the weights in the compute dtype."""
        return float(self.weights.numel * self.run.engines.compute.itemsize)

    def _host(self, phase: str) -> Parts:
        """Bytes on a host, of all its ranks."""
        here = -(-self.run.ranks // self.run.hosts)
        parts: Parts = {"processes": HOST_PROCESS}
        parts |= self.engine.host
        if self._stage == 3 and self._offloaded:
            parts["weights"] = page_locked(self.weights.base / self.run.ranks)
        if self.run.options.activation_offloading:
            parts["hidden states"] = page_locked(self._hidden * self.checkpointed)
        for model in self.run.frozen:
            weights = self.run.weights_of(model.source)
            if model.placement == "offload" and weights is not None:
                parts[model.name] = page_locked(weights.base / self.run.ranks)
        adapted = self.run.engines.adapters is not None
        if self._server(phase):  # while it sleeps, it keeps the base weights for the next adapter
            parts["vLLM server"] = HOST_PROCESS + (self._unpacked if adapted and phase != "rollout" else 0)
        parts = {name: size * here for name, size in parts.items()}
        if self._uses_vllm and phase == "rollout":
            parts["sent weights"] = self.weights.adapters if adapted else self._unpacked
        if phase == "save" and self._stage == 3:
            parts["gathered weights"] = self.weights.adapters if adapted else self.weights.base
        return added(parts)
