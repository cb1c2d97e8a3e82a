"""The engines of a run: built as planned when they are first needed, and released."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import enable_full_determinism, set_seed

from alignment.config.dtypes import SHORT
from alignment.config.errors import OptionError
from alignment.config.options import AlignmentConfig
from alignment.engines.checkpoints.engine_state import EngineState, ScheduleState
from alignment.engines.checkpoints.frozen import FrozenTensors
from alignment.engines.collectives import device
from alignment.engines.launch_env import world_size
from alignment.engines.optimizers import build_optimizer, build_scheduler, check_counts, step_bytes
from alignment.engines.saving import (
    load_adapters,
    load_weights,
    trained_keys,
    write_adapters,
    write_model,
    written_bytes,
)
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
    """Wrap a model in its engine and check once that its scores are its own.

    Args:
        scorer: of a model loaded for ``ds_config``.
        options: the run's.
        ds_config: this engine's DeepSpeed configuration.
        training_steps: length of the schedule; None for a frozen engine.
        optimizers: the user's own optimizer and schedule, or Nones.
        task: what the model is.
        reduce_once: see :class:`PolicyEngine`.
    """
    if training_steps is None:
        return checked(FrozenEngine(scorer, ds_config), task)
    if options.gradient_checkpointing:
        enable_checkpointing(scorer.model, options.gradient_checkpointing_kwargs)
        scorer.one_pass = bool((options.gradient_checkpointing_kwargs or {}).get("use_reentrant"))
        if scorer.one_pass and not all(parameter.requires_grad for parameter in scorer.parameters()):
            # Re-entrant checkpoints give no gradient to anything unless one goes through their input.
            scorer.model.enable_input_require_grads()
    optimizer = optimizers[0] or build_optimizer(scorer, options)
    scheduler = optimizers[1] or build_scheduler(optimizer, options, training_steps)
    policy = checked(PolicyEngine(scorer, ds_config, optimizer, scheduler, reduce_once), task)
    check_counts(inner_optimizer(policy.engine), state_units(policy.engine))
    return policy


class RunEngines:
    """Policy, reference and what the method needs beside them.

    Args:
        context: the run.
        plan: DeepSpeed configurations and dtypes.
        optimizers: the user's own optimizer and schedule, or Nones.
        aux_coefficient: weight of the balancing loss of a mixture of experts; None where there is none.
        resources: what the method needs besides.

    Attributes:
        models: policy and reference; None while there are no engines.
        stores: the log-probs of a precomputed reference; None for any other.
        trained: whether the policy has been trained, and what is released with it is lost.
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
        """The policy: the live model, or once it is loaded the one inside the engine, else None.

        With adapters it is the ``PeftModel`` around it.
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
        """Whether the policy, as it is trained, is there only once engines are built.

        A live model of another dtype is one that they convert; one that was trained stays as they left it.
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
        """The computation of one window; there once engines are."""
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
        """What of the policy does not train, and whether it has changed since the engine was built."""
        assert self._frozen is not None
        return self._frozen

    @property
    def stage(self) -> int:
        """The policy's ZeRO stage."""
        return int(self.plan.policy["zero_optimization"]["stage"])

    @property
    def trains_fp32(self) -> bool:
        """Whether the weights that train are kept in fp32, and need no masters beside them."""
        trained = (p for p in self.policy.scorer.model.parameters() if p.requires_grad)
        return all(parameter.dtype == torch.float32 for parameter in trained)

    def trained_bytes(self) -> int:
        """The size of what :meth:`write` writes."""
        return written_bytes(self.policy.scorer.model, self.plan.adapters)

    def exported_names(self) -> dict[str, str]:
        """The keys of trainable parameters in the files that :meth:`write` writes, by their names."""
        return trained_keys(self.policy.scorer.model, self.plan.adapters)

    def build(self, training_steps: int | None) -> None:
        """Build the engines, unless those that there are will do; collective.

        Args:
            training_steps: length of the schedule; None for evaluation alone.

        Raises:
            OptionError: the trained weights were released.
        """
        if self._pass is not None and (self._trainable or training_steps is None):
            return
        if self.trained and self.models is None:
            raise OptionError(
                "close() released the trained weights and the reference: call save_model before it, then make another "
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

    def follow(self, schedule: LRScheduler) -> None:
        """Let the policy's learning rate follow another schedule of its optimizer from now on."""
        policy = self.policy
        policy.scheduler = policy.engine.lr_scheduler = self.context.events.handler.lr_scheduler = schedule
        self.context.run_state.register("schedule", ScheduleState(schedule))

    def know(self, datasets: Iterable[PreparedData]) -> None:
        """Let a precomputed reference answer about these datasets too; collective, and nothing for any other one.

        Raises:
            OptionError: that takes the policy as it was given, which was trained since.
        """
        if self.stores is None:
            return
        if self.stores.plan.copies_policy and not self.trained:
            self.close()  # so that the reference is built before the policy's engine once more
        if self.models is None:
            self.stores.further = tuple(datasets)
            return
        assert isinstance(self.models.reference, PrecomputedReference)
        self.models.reference.tables |= self.stores.tables(datasets, loadable=not self.stores.plan.copies_policy)

    def _built(self, training_steps: int | None) -> Models:
        """Reference and policy, each released again where a later build fails."""
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
            if self.stores is None:  # one that was only asked may have left something; after a resume it would not
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
        """How the policy's gradients are summed, which is written into its configuration too; collective."""
        args, plan = self.context.args, self.plan
        # By tokens a window is cut into as many micro-batches as it takes, at most one for each row.
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
        """The policy's model with head and adapters, and how the policy as given is computed with it."""
        args, plan = self.context.args, self.plan
        model = plan.source.load(args, plan.compute, ds_config, device(), self.context.tell)
        if args.disable_dropout:
            disable_dropout(model)
        scorer = self.context.method.task.scorer(model, self.aux_coefficient is not None)
        if plan.adapters is None:
            return scorer, None
        keep = isinstance(plan.reference, AdapterReferencePlan)
        given = equip(model, plan.adapters, ds_config=ds_config, dtype=plan.compute, seed=args.seed, keep=keep)
        return scorer, given

    def write(self, folder: Path) -> None:
        """Write what is trained, whole or as adapters, and the tokenizer into ``folder``; collective."""
        context, adapters = self.context, self.plan.adapters
        assert self.models is not None
        model, first = self.models.policy.scorer.model, context.is_first
        if adapters is None:
            write_model(model, context.processing_class, folder, first_rank=first)
        else:
            write_adapters(model, adapters, self.plan.source, context.processing_class, folder, first_rank=first)

    def restore(self, folder: Path) -> None:
        """Put weights that :meth:`write` wrote back into the policy; collective, for the end of a run."""
        adapters, model = self.plan.adapters, self.policy.scorer.model
        if adapters is None:
            load_weights(model, folder, first_rank=self.context.is_first)
        else:
            load_adapters(model, adapters, folder, first_rank=self.context.is_first)

    def close(self) -> None:
        """Release the engines. Trained weights go with them, so the trainer is then at its end: save before.

        A live model keeps what training set: its trained weights (partitioned still under ZeRO-3), dropout at 0,
        checkpointing, and a head that also answers with log-probs.
        """
        self.resources.close()
        if self.models is not None:
            self.models.close()
        adapters = self.plan.adapters
        if adapters is not None and adapters.live is not None and REFERENCE in adapters.live.peft_config:
            adapters.live.delete_adapter(REFERENCE)  # ours, and no part of what the user saves
        self.models = self._pass = self._frozen = self._view = None
        self._trainable = False
        handler = self.context.events.handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, None, None
