"""The engines of a run: built when first needed, and released."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import enable_full_determinism, set_seed

from alignment.checkpoint import saving
from alignment.checkpoint.engine_state import EngineState, ScheduleState
from alignment.checkpoint.frozen import FrozenTensors
from alignment.config.deepspeed_keys import value_at
from alignment.config.dtypes import SHORT
from alignment.config.errors import OptionError
from alignment.config.fields import keywords
from alignment.config.options import AlignmentConfig
from alignment.engines.collectives import device
from alignment.engines.offloading import ActivationOffloading
from alignment.engines.optimizers import build_optimizer, build_scheduler, check_counts
from alignment.engines.scoring import FrozenEngine, PolicyEngine, ScoringEngine, checked
from alignment.internals.deepspeed_state import inner_optimizer, state_units
from alignment.internals.peft import as_peft_model
from alignment.models.adapters.injection import REFERENCE, Given, equip
from alignment.models.loading import disable_dropout, enable_checkpointing
from alignment.models.scorer import Scorer
from alignment.models.tasks import CAUSAL_LM, Task
from alignment.planning.engines import EnginePlan
from alignment.planning.gradients import GradientPlan
from alignment.planning.placing import smallest_card
from alignment.planning.planner import Planner
from alignment.references.adapter import AdapterReferencePlan
from alignment.references.base import Reference
from alignment.references.engine import EngineReference, ReferencePlan
from alignment.reporting.progress import draws_bars
from alignment.run.ranks import tell, world_size
from alignment.training.checkpointing import CheckpointedLayers
from alignment.training.context import Resources, RunContext
from alignment.training.data import PreparedData
from alignment.training.method import Models
from alignment.training.precompute import ReferenceStores
from alignment.training.preparation import check_tokens
from alignment.training.window import WindowPass


def build_engine(
    scorer: Scorer,
    options: AlignmentConfig,
    ds_config: dict[str, Any],
    *,
    training_steps: int | None,
    optimizers: tuple[Any, Any] = (None, None),
    task: Task = CAUSAL_LM,
    reduce_once: bool = False,
) -> ScoringEngine:
    """Wrap a scorer, whose model was loaded for ``ds_config``, in its engine; check once that its scores are correct.

    The engine is frozen if ``training_steps``, the length of the schedule, is None. The user's own optimizer and
    schedule in ``optimizers`` are used instead of those of the options.
    """
    if training_steps is None:
        return checked(FrozenEngine(scorer, ds_config), task, options.pack)
    if options.gradient_checkpointing:
        enable_checkpointing(scorer.model, keywords(options.gradient_checkpointing_kwargs))
        scorer.one_pass = bool(keywords(options.gradient_checkpointing_kwargs).get("use_reentrant"))
        if scorer.one_pass and not all(parameter.requires_grad for parameter in scorer.parameters()):
            # Reentrant checkpointing only computes gradients if an input of the checkpoint requires one.
            scorer.model.enable_input_require_grads()
    offloaded = value_at(ds_config, "zero_optimization.offload_optimizer.device") == "cpu"
    optimizer = optimizers[0] or build_optimizer(scorer, options, offloaded=offloaded)
    scheduler = optimizers[1] or build_scheduler(optimizer, options, training_steps)
    policy = checked(PolicyEngine(scorer, ds_config, optimizer, scheduler, reduce_once), task, options.pack)
    check_counts(inner_optimizer(policy.engine), state_units(policy.engine))
    return policy


class RunEngines:
    """Policy, reference and the method's further resources, built when first needed.

    Attributes:
        models: policy and reference; None while there are no engines.
        stores: the log-probs of a precomputed reference, or None.
        trained: whether the policy has been trained, so that releasing it loses its weights.
    """

    def __init__(
        self,
        context: RunContext,
        plan: EnginePlan,
        optimizers: tuple[Any, Any],
        aux_coefficient: float | None,
        resources: Resources,
    ) -> None:
        self.context, self.plan, self.optimizers = context, plan, optimizers
        self.aux_coefficient, self.resources, self.trained = aux_coefficient, resources, False
        self.models: Models | None = None
        self.stores: ReferenceStores | None = None
        if isinstance(plan.reference, ReferencePlan) and plan.reference.precomputed:
            self.stores = ReferenceStores(context, plan.reference)
        self._frozen: FrozenTensors | None = None
        self._pass: WindowPass | None = None
        self._given: Given | None = None  # how the initial policy is computed
        self._view: Any = None  # the PeftModel around new adapters
        self._offloading: ActivationOffloading | None = None

    @property
    def model(self) -> Any:
        """The policy, with adapters the ``PeftModel`` around it: the live model, else the engine's, else None."""
        adapters = self.plan.adapters
        if adapters is not None and adapters.live is not None:
            return adapters.live
        if self.models is None:
            return self.plan.source.live
        model = self.models.policy.scorer.model
        if adapters is None:
            return model
        if self._view is None:
            self._view = as_peft_model(model, adapters.name)
        return self._view

    @property
    def waits_for_model(self) -> bool:
        """Whether the policy in its trained form, dtype and adapters included, only exists after engines are built."""
        adapters, model = self.plan.adapters, self.plan.source.live
        live = model is not None and (self.trained or model.dtype == self.plan.compute)
        adapted = adapters is None or self.trained or adapters.live is not None
        return self.models is None and not (live and adapted)

    @property
    def ready(self) -> bool:
        """Whether windows can be computed."""
        return self._pass is not None

    @property
    def window_pass(self) -> WindowPass:
        """The window pass; available after the engines are built."""
        assert self._pass is not None
        return self._pass

    @property
    def policy(self) -> PolicyEngine:
        """The training engine."""
        policy = self.window_pass.models.policy
        assert isinstance(policy, PolicyEngine)
        return policy

    @property
    def frozen(self) -> FrozenTensors:
        """The frozen tensors of the policy, and whether they have changed since the engine was built."""
        assert self._frozen is not None
        return self._frozen

    def exported_names(self) -> dict[str, str]:
        """The keys of the parameters that are trained in fp32 in the output of :meth:`write`, by parameter name."""
        return saving.trained_keys(self.policy.scorer.model, self.plan.adapters)

    def build(self, training_steps: int | None) -> None:
        """Build engines for this number of steps, None for evaluation, unless existing ones can be used; collective.

        Raises:
            OptionError: if the trained weights were released.
        """
        if self._pass is not None and (training_steps is None or isinstance(self._pass.models.policy, PolicyEngine)):
            return
        if self.trained and self.models is None:
            raise OptionError(
                "close() released the trained weights and the reference: call save_model before it, then create a new "
                "trainer"
            )
        self.close()
        args, context = self.context.args, self.context
        (enable_full_determinism if args.full_determinism else set_seed)(args.seed)
        if args.tf32 is not None:
            torch.backends.cuda.matmul.allow_tf32 = args.tf32
        with contextlib.nullcontext() if draws_bars(args.disable_tqdm) else saving.no_progress_bar():
            self.models = self._built(training_steps)
        policy, handler = self.models.policy, context.events.handler
        context.data.packs = policy.shares
        if context.data.sampler is not None:
            context.data.sampler.packs = policy.shares
        check_tokens(args, [data.table for data in context.data.sets], policy.shares)
        handler.model = self.model
        handler.optimizer, handler.lr_scheduler = policy.engine.optimizer, policy.engine.lr_scheduler
        if isinstance(policy, PolicyEngine):
            context.run_state.register("schedule", ScheduleState(policy.scheduler))
            context.run_state.register("engine", EngineState(policy))
            layers = None if context.memory_plan is None else context.memory_plan.checkpointed_layers
            asked = True if args.activation_offloading else args.gradient_checkpointing
            checkpointed = CheckpointedLayers(asked, policy.scorer.model, layers)
            tell(context.run_state.register("gradient checkpointing", checkpointed).describe())
            if args.activation_offloading:
                self._offloading = ActivationOffloading(policy.scorer, policy.device)
        self._frozen = FrozenTensors(policy.scorer.model)
        self._pass = self.resources.window_pass(context, self.models, self.aux_coefficient)
        if isinstance(policy, PolicyEngine):
            self._pass.passes.together = self._together()
            tell(context.run_state.register("reference", self._pass.passes).describe())
        self.resources.built(policy.scorer.model)
        args.engines_built()

    def _together(self) -> int:
        """Return the number of micro-batches in a pass of the reference, from the memory plan; collective.

        If tokens limit micro-batches, the padding of several together is not limited.
        """
        args, plan, reference = self.context.args, self.context.memory_plan, self.window_pass.models.reference
        if plan is None or not isinstance(reference, EngineReference):
            return 1
        by_tokens = args.max_tokens_per_batch is not None or args.auto_find_batch_size
        return 1 if by_tokens and not reference.engine.packs else plan.plan.together

    def follow(self, schedule: LRScheduler) -> None:
        """Let the policy's learning rate follow another schedule of its optimizer."""
        policy = self.policy
        policy.scheduler = policy.engine.lr_scheduler = self.context.events.handler.lr_scheduler = schedule
        self.context.run_state.register("schedule", ScheduleState(schedule))

    def check_known(self, datasets: Iterable[PreparedData]) -> None:
        """Check that the reference can be asked about the rows of these datasets.

        Raises:
            OptionError: if its log-probs were precomputed for other datasets.
        """
        known = {data.key for data in self.context.data.sets}
        new = next((data.where for data in datasets if data.key not in known), None)
        if self.stores is not None and new is not None:
            raise OptionError(
                f"{new}: its reference log-probs are not precomputed; pass it to the constructor as eval_dataset"
            )

    def _built(self, training_steps: int | None) -> Models:
        """Build reference and policy; each is released if a later build fails."""
        args, plan = self.context.args, self.plan
        reference: Reference | None = None
        with contextlib.ExitStack() as built:
            built.callback(self.resources.close)
            for line in self.resources.build():
                tell(line)
            if isinstance(plan.reference, ReferencePlan):
                reference = plan.reference.build(args) if self.stores is None else self.stores.reference()
                built.callback(reference.close)
            ds_config = plan.policy_frozen if training_steps is None else plan.policy
            scorer = self._scorer(ds_config)
            gradients = None if training_steps is None else self._plan_gradients()
            policy = build_engine(
                scorer,
                args,
                ds_config,
                training_steps=training_steps,
                optimizers=self.optimizers,
                task=self.context.method.task,
                reduce_once=gradients is not None and gradients.once,
            )
            built.callback(policy.close)
            if isinstance(plan.reference, AdapterReferencePlan):
                assert self._given is not None
                reference = plan.reference.of(policy, self._given)
            built.pop_all()
        for line in (plan.describe(self._given), *plan.notes):
            tell(line)
        if self.context.memory_plan is not None:
            tell(self.context.memory_plan.describe())
        tell(None if gradients is None else gradients.describe())
        return Models(policy, reference)

    def _plan_gradients(self) -> GradientPlan | None:
        """Plan how the policy's gradients are accumulated, and write it to its configuration; collective.

        On a CPU, memory is assumed to suffice.
        """
        plan = self.context.memory_plan
        if plan is not None:
            made = plan.planner.gradients(plan.tokens)
        else:
            made = Planner(self.context.args, self.plan, world_size(), card=smallest_card() or math.inf).gradients()
        if made is not None:
            self.plan.policy["data_types"]["grad_accum_dtype"] = SHORT[made.accumulate]
        return made

    def _scorer(self, ds_config: dict[str, Any]) -> Scorer:
        """Load the policy's model with head and adapters; return its scorer."""
        args, plan = self.context.args, self.plan
        model = plan.source.load(args, plan.compute, ds_config, device())
        scorer = self.context.method.task.scorer(model, self.aux_coefficient is not None)
        if plan.adapters is not None:
            self._given = equip(
                model,
                plan.adapters,
                ds_config=ds_config,
                dtype=plan.compute,
                seed=args.seed,
                keep=isinstance(plan.reference, AdapterReferencePlan),
            )
        if args.disable_dropout:  # also that of the adapters
            disable_dropout(model)
        return scorer

    def write(self, folder: Path) -> None:
        """Write what is trained (full model or adapters) and the tokenizer to ``folder``; collective."""
        model, adapters = self.window_pass.models.policy.scorer.model, self.plan.adapters
        tokenizer, first = self.context.processing_class, self.context.is_first
        if adapters is None:
            saving.write_model(model, tokenizer, folder, first_rank=first)
        else:
            saving.write_adapters(model, adapters, self.plan.source, tokenizer, folder, first_rank=first)

    def restore(self, folder: Path) -> None:
        """Load weights written by :meth:`write` into the policy, at the end of a run; collective."""
        saving.load_weights(self.policy.scorer.model, self.plan.adapters, folder, first_rank=self.context.is_first)
        self.window_pass.restored()

    def close(self) -> None:
        """Release the engines and with them the trained weights; see :meth:`AlignmentTrainer.close`."""
        self.resources.close()
        if self._offloading is not None:
            self._offloading.close()
            self._offloading = None
        if self.models is not None:
            self.models.close()
        adapters = self.plan.adapters
        if adapters is not None and adapters.live is not None and REFERENCE in adapters.live.peft_config:
            adapters.live.delete_adapter(REFERENCE)  # added by this package; the user must not save it
        self.models = self._pass = self._frozen = self._view = None
        handler = self.context.events.handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, None, None
