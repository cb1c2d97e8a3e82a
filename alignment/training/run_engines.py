"""The engines of a run: built when first needed, and released."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import enable_full_determinism, set_seed

from alignment.checkpoint.engine_state import EngineState, ScheduleState
from alignment.checkpoint.frozen import FrozenTensors
from alignment.checkpoint.saving import (
    load_adapters,
    load_weights,
    trained_keys,
    write_adapters,
    write_model,
    written_bytes,
)
from alignment.config.dtypes import SHORT
from alignment.config.errors import OptionError
from alignment.config.fields import keywords
from alignment.config.options import AlignmentConfig
from alignment.engines.collectives import device, true_on_every_rank
from alignment.engines.optimizers import build_optimizer, build_scheduler, check_counts, step_bytes
from alignment.engines.scoring import FrozenEngine, PolicyEngine, ScoringEngine, checked
from alignment.internals.deepspeed_state import inner_optimizer, state_units
from alignment.internals.peft import as_peft_model
from alignment.models.adapters.given import Given, equip
from alignment.models.adapters.injection import REFERENCE
from alignment.models.loading import disable_dropout, enable_checkpointing
from alignment.models.scorer import Scorer
from alignment.models.tasks import CAUSAL_LM, Task
from alignment.planning.engines import EnginePlan
from alignment.planning.gradients import (
    GradientPlan,
    bytes_in_use,
    plan_gradients,
    situation_of,
    sizes_of,
)
from alignment.references.adapter import AdapterReferencePlan
from alignment.references.base import Reference
from alignment.references.engine import ReferencePlan
from alignment.references.precomputed import PrecomputedReference
from alignment.run.ranks import world_size
from alignment.training.context import Resources, RunContext
from alignment.training.data import PreparedData
from alignment.training.method import Models
from alignment.training.precompute import ReferenceStores
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
    """Wrap a model in its engine and verify once that it computes correct scores.

    Args:
        scorer: scorer of a model loaded for ``ds_config``.
        options: the run's options.
        ds_config: this engine's DeepSpeed configuration.
        training_steps: length of the schedule; None for a frozen engine.
        optimizers: the user's optimizer and schedule, or Nones.
        task: the model's task.
        reduce_once: see :class:`PolicyEngine`.
    """
    if training_steps is None:
        return checked(FrozenEngine(scorer, ds_config), task)
    if options.gradient_checkpointing:
        enable_checkpointing(scorer.model, keywords(options.gradient_checkpointing_kwargs))
        scorer.one_pass = bool(keywords(options.gradient_checkpointing_kwargs).get("use_reentrant"))
        if scorer.one_pass and not all(parameter.requires_grad for parameter in scorer.parameters()):
            # Reentrant checkpointing only computes gradients if an input of the checkpoint requires one.
            scorer.model.enable_input_require_grads()
    optimizer = optimizers[0] or build_optimizer(scorer, options)
    scheduler = optimizers[1] or build_scheduler(optimizer, options, training_steps)
    policy = checked(PolicyEngine(scorer, ds_config, optimizer, scheduler, reduce_once), task)
    check_counts(inner_optimizer(policy.engine), state_units(policy.engine))
    return policy


class RunEngines:
    """Policy, reference and the method's further resources.

    Args:
        context: the run.
        plan: DeepSpeed configurations and dtypes.
        optimizers: the user's optimizer and schedule, or Nones.
        aux_coefficient: weight of the load-balancing loss of a mixture of experts, or None.
        resources: the method's further resources.

    Attributes:
        models: policy and reference; None without engines.
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
        self.aux_coefficient, self.resources = aux_coefficient, resources
        self.models: Models | None = None
        asked = plan.reference
        self.stores: ReferenceStores | None = None
        if isinstance(asked, ReferencePlan) and asked.precomputed:
            self.stores = ReferenceStores(context, asked)
        self.trained = False
        self._frozen: FrozenTensors | None = None
        self._pass: WindowPass | None = None
        self._given: Given | None = None
        self._gradients: GradientPlan | None = None
        self._trainable = False
        self._view: Any = None  # the PeftModel around new adapters

    @property
    def model(self) -> Any:
        """The policy: the live model, or the one inside the engine after it is built, else None.

        With adapters, the ``PeftModel`` around it.
        """
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
        """Whether the policy in its trained form only exists after engines are built.

        A live model of a different dtype is converted by the engines; one that was trained remains converted.
        """
        adapters, model = self.plan.adapters, self.plan.source.live
        live = model is not None and (self.trained or model.dtype == self.plan.compute)
        if adapters is not None and not self.trained:
            live = live and adapters.live is not None
        return self.models is None and not live

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

    @property
    def stage(self) -> int:
        """The policy's ZeRO stage."""
        return int(self.plan.policy["zero_optimization"]["stage"])

    @property
    def trains_fp32(self) -> bool:
        """Whether trained weights are kept in fp32 and need no master weights."""
        trained = (p for p in self.policy.scorer.model.parameters() if p.requires_grad)
        return all(parameter.dtype == torch.float32 for parameter in trained)

    def trained_bytes(self) -> int:
        """The size of the output of :meth:`write` in bytes."""
        return written_bytes(self.policy.scorer.model, self.plan.adapters)

    def exported_names(self) -> dict[str, str]:
        """The keys of trainable parameters in the output of :meth:`write`, by parameter name."""
        return trained_keys(self.policy.scorer.model, self.plan.adapters)

    def build(self, training_steps: int | None) -> None:
        """Build the engines, unless the existing ones can be used; collective.

        Args:
            training_steps: length of the schedule; None for evaluation only.

        Raises:
            OptionError: if the trained weights were released.
        """
        if self._pass is not None and (self._trainable or training_steps is None):
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
        self.models = self._built(training_steps)
        policy, handler = self.models.policy, context.events.handler
        handler.model = self.model
        handler.optimizer, handler.lr_scheduler = policy.engine.optimizer, policy.engine.lr_scheduler
        self._trainable = training_steps is not None
        if isinstance(policy, PolicyEngine):
            context.run_state.register("schedule", ScheduleState(policy.scheduler))
            context.run_state.register("engine", EngineState(policy))
        self._frozen = FrozenTensors(policy.scorer.model)
        self._pass = self.resources.window_pass(context, self.models, self.aux_coefficient)
        for line in (self.plan.describe(self._given), *self.plan.notes):
            context.tell(line)
        context.tell(None if self._gradients is None else self._gradients.describe())
        self.resources.built(policy.scorer.model)
        args.engines_built()

    def follow(self, schedule: LRScheduler) -> None:
        """Let the policy's learning rate follow another schedule of its optimizer."""
        policy = self.policy
        policy.scheduler = policy.engine.lr_scheduler = self.context.events.handler.lr_scheduler = schedule
        self.context.run_state.register("schedule", ScheduleState(schedule))

    def know(self, datasets: Iterable[PreparedData]) -> None:
        """Let a precomputed reference cover these datasets too; collective. Does nothing for other references.

        Raises:
            OptionError: if that requires the initial policy, which has been trained since.
        """
        if self.stores is None:
            return
        if self.stores.plan.copies_policy and not self.trained:
            self.close()  # so that the reference is again built before the policy's engine
        if self.models is None:
            self.stores.further = tuple(datasets)
            return
        assert isinstance(self.models.reference, PrecomputedReference)
        self.models.reference.tables |= self.stores.tables(datasets, loadable=not self.stores.plan.copies_policy)

    def _built(self, training_steps: int | None) -> Models:
        """Build reference and policy; each is released if a later build fails."""
        args, plan = self.context.args, self.plan
        reference: Reference | None = None
        with contextlib.ExitStack() as built:
            built.callback(self.resources.close)
            for line in self.resources.build():
                self.context.tell(line)
            others = bytes_in_use()
            if isinstance(plan.reference, ReferencePlan):
                reference = plan.reference.build(args) if self.stores is None else self.stores.reference()
                built.callback(reference.close)
            if self.stores is None:  # an evaluated reference may have changed state, unlike in a resumed run
                others = bytes_in_use()
            ds_config = plan.policy_frozen if training_steps is None else plan.policy
            scorer, self._given = self._scorer(ds_config)
            self._gradients = None if training_steps is None else self._planned_gradients(scorer, others)
            policy = build_engine(
                scorer,
                args,
                ds_config,
                training_steps=training_steps,
                optimizers=self.optimizers,
                task=self.context.method.task,
                reduce_once=self._gradients is not None and self._gradients.once,
            )
            built.callback(policy.close)
            if isinstance(plan.reference, AdapterReferencePlan):
                assert self._given is not None
                reference = plan.reference.of(policy, self._given)
            built.pop_all()
        return Models(policy, reference)

    def _planned_gradients(self, scorer: Scorer, others: int) -> GradientPlan | None:
        """Plan how the policy's gradients are summed, and write it to its configuration; collective."""
        args, plan = self.context.args, self.plan
        # With max_tokens_per_batch, a window has as many micro-batches as needed, at most one per row.
        parts = 1 if args.max_tokens_per_batch is None else args.per_device_train_batch_size
        most = parts * args.gradient_accumulation_steps
        at = situation_of(plan.policy, world_size(), most, bool(args.gradient_checkpointing))
        if not any(self.optimizers):
            at = replace(at, states=step_bytes(args))
        made = plan_gradients(sizes_of(scorer, others), plan.dtypes, at)
        if made is not None:
            plan.policy["data_types"]["grad_accum_dtype"] = SHORT[made.accumulate]
        return made

    def _scorer(self, ds_config: dict[str, Any]) -> tuple[Scorer, Given | None]:
        """Load the policy's model with head and adapters; return its scorer, and how to compute the initial policy."""
        args, plan = self.context.args, self.plan
        model = plan.source.load(args, plan.compute, ds_config, device(), self.context.tell)
        scorer = self.context.method.task.scorer(model, self.aux_coefficient is not None)
        given = None
        if plan.adapters is not None:
            given = equip(
                model,
                plan.adapters,
                ds_config=ds_config,
                dtype=plan.compute,
                seed=args.seed,
                keep=isinstance(plan.reference, AdapterReferencePlan),
                agreed=true_on_every_rank,
            )
        if args.disable_dropout:  # also that of the adapters
            disable_dropout(model)
        return scorer, given

    def write(self, folder: Path) -> None:
        """Write what is trained (full model or adapters) and the tokenizer to ``folder``; collective."""
        context, adapters = self.context, self.plan.adapters
        assert self.models is not None
        model, first = self.models.policy.scorer.model, context.is_first
        if adapters is None:
            write_model(model, context.processing_class, folder, first_rank=first)
        else:
            write_adapters(model, adapters, self.plan.source, context.processing_class, folder, first_rank=first)

    def restore(self, folder: Path) -> None:
        """Load weights written by :meth:`write` into the policy, at the end of a run; collective."""
        adapters, model = self.plan.adapters, self.policy.scorer.model
        if adapters is None:
            load_weights(model, folder, first_rank=self.context.is_first)
        else:
            load_adapters(model, adapters, folder, first_rank=self.context.is_first)

    def close(self) -> None:
        """Release the engines. Trained weights are released too, so save before; the trainer cannot train again.

        A live model keeps the effects of training: its trained weights (still partitioned under ZeRO-3), dropout of 0,
        gradient checkpointing, and a head that can also return log-probs.
        """
        self.resources.close()
        if self.models is not None:
            self.models.close()
        adapters = self.plan.adapters
        if adapters is not None and adapters.live is not None and REFERENCE in adapters.live.peft_config:
            adapters.live.delete_adapter(REFERENCE)  # added by this package; the user must not save it
        self.models = self._pass = self._frozen = self._view = None
        self._trainable = False
        handler = self.context.events.handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, None, None
