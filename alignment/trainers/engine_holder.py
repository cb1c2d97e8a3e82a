"""The engines of a trainer: built when they are first needed, once for training or for evaluation alone, released."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from transformers import PreTrainedModel, enable_full_determinism, set_seed

from alignment.config.errors import OptionError
from alignment.config.options import AlignmentConfig
from alignment.engines.phases import Phases
from alignment.models.source import ModelSource
from alignment.trainers.engine_setup import EnginePlan, build_engine, reference_model
from alignment.trainers.events import Events
from alignment.trainers.method import Method, Models
from alignment.trainers.window import WindowPass


class EngineHolder:
    """What a trainer is with respect to its engines; :class:`~alignment.trainers.base.AlignmentTrainer` is one.

    Attributes:
        args, method, events, phases: the run's.
        policy_source, reference_source: what engines are built around; the same where no other reference was given.
        engine_plan: their DeepSpeed configurations and dtypes.
        optimizers: the user's own optimizer and schedule, or Nones.
        aux_coefficient: weight of the balancing loss of a mixture of experts; None where there is none.
    """

    args: AlignmentConfig
    method: Method
    events: Events
    phases: Phases
    policy_source: ModelSource
    reference_source: ModelSource
    engine_plan: EnginePlan
    optimizers: tuple[Any, Any]
    aux_coefficient: float | None

    def __init__(self) -> None:
        self._models: Models | None = None
        self._pass: WindowPass | None = None
        self._trainable = self._trained = False

    def tell(self, text: str | None) -> None:
        """Print a line on the first rank."""
        raise NotImplementedError

    @property
    def model(self) -> PreTrainedModel | None:
        """The policy: the live model, or once it is loaded the one inside the engine, else None."""
        if self._models is not None:
            return self._models.policy.scorer.model
        return self.policy_source.live

    def close(self) -> None:
        """Release the engines. Trained weights go with them, so this trainer is then at its end: save before.

        A live model keeps what training set: its trained weights (partitioned still under ZeRO-3), dropout at 0,
        checkpointing, and a head that also answers with log-probs.
        """
        if self._models is not None:
            self._models.close()
        self._models = self._pass = None
        self._trainable = False
        handler = self.events.handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, None, None

    @property
    def window_pass(self) -> WindowPass:
        """The computation of one window; there once engines are."""
        assert self._pass is not None
        return self._pass

    def _build(self, training_steps: int | None) -> None:
        if self._pass is not None and (self._trainable or training_steps is None):
            return
        if self._trained and self._models is None:
            raise OptionError(
                "close() released the trained weights and the reference: call save_model before it, then make another "
                "trainer"
            )
        self.close()
        args, plan = self.args, self.engine_plan
        (enable_full_determinism if args.full_determinism else set_seed)(args.seed)
        if args.tf32 is not None:
            torch.backends.cuda.matmul.allow_tf32 = args.tf32
        with contextlib.ExitStack() as built:
            self._build_more(built)
            reference = None
            if plan.reference is not None:
                twin = reference_model(self.reference_source, self.policy_source, args, plan)
                reference = build_engine(twin, args, plan.reference, training_steps=None)
                built.callback(reference.close)
            ds_config = plan.policy_frozen if training_steps is None else plan.policy
            policy = build_engine(
                self.policy_source.load(args, plan.compute, ds_config, self.tell),
                args,
                ds_config,
                training_steps=training_steps,
                optimizers=self.optimizers,
                aux_loss=self.aux_coefficient is not None,
                architecture=self.method.architecture,
            )
            built.pop_all()
        self._models = Models(policy, reference)
        handler = self.events.handler
        handler.model = policy.scorer.model
        handler.optimizer, handler.lr_scheduler = policy.engine.optimizer, policy.engine.lr_scheduler
        self._trainable = training_steps is not None
        self._pass = self._make_pass(self._models)
        self.tell(plan.describe(self.policy_source, self.reference_source))

    def _build_more(self, built: contextlib.ExitStack) -> None:
        """Build what a method needs beside policy and reference; ``built`` releases it where a later build fails."""

    def _make_pass(self, models: Models) -> WindowPass:
        """The computation of windows with these models."""
        return WindowPass(self.method, models, self.phases, self.aux_coefficient)
