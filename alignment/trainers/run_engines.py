"""The engines of a run: built when they are first needed, once for training or for evaluation alone, released."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from transformers import PreTrainedModel, enable_full_determinism, set_seed

from alignment.config.errors import OptionError
from alignment.engines.scoring import PolicyEngine
from alignment.trainers.companion import Companion
from alignment.trainers.context import RunContext
from alignment.trainers.engine_setup import EnginePlan, build_engine
from alignment.trainers.method import Models
from alignment.trainers.window import WindowPass


class RunEngines:
    """Policy, reference and what the method needs beside them.

    Args:
        context: the run.
        plan: DeepSpeed configurations and dtypes.
        optimizers: the user's own optimizer and schedule, or Nones.
        aux_coefficient: weight of the balancing loss of a mixture of experts; None where there is none.
        companion: what the method needs besides.

    Attributes:
        models: policy and reference; None while there are no engines.
        trained: whether the policy has been trained, and what is released with it is lost.
    """

    def __init__(
        self,
        context: RunContext,
        plan: EnginePlan,
        optimizers: tuple[Any, Any],
        aux_coefficient: float | None,
        companion: Companion,
    ) -> None:
        self.context, self.plan, self.optimizers = context, plan, optimizers
        self.aux_coefficient, self.companion = aux_coefficient, companion
        self.models: Models | None = None
        self.trained = False
        self._pass: WindowPass | None = None
        self._trainable = False

    @property
    def model(self) -> PreTrainedModel | None:
        """The policy: the live model, or once it is loaded the one inside the engine, else None."""
        return self.plan.source.live if self.models is None else self.models.policy.scorer.model

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
        handler.model = policy.scorer.model
        handler.optimizer, handler.lr_scheduler = policy.engine.optimizer, policy.engine.lr_scheduler
        self._trainable = training_steps is not None
        if isinstance(policy, PolicyEngine):
            context.run_state.register("schedule", policy.scheduler)
        self._pass = self.companion.window_pass(context, self.models, self.aux_coefficient)
        context.tell(self.plan.describe())
        self.companion.built(policy.scorer.model)

    def _built(self, training_steps: int | None) -> Models:
        """Reference and policy, each released again where a later build fails."""
        args, plan, reference = self.context.args, self.plan, None
        with contextlib.ExitStack() as built:
            built.callback(self.companion.close)
            for line in self.companion.build():
                self.context.tell(line)
            if plan.reference is not None:
                reference = plan.reference.build(args)
                built.callback(reference.close)
            ds_config = plan.policy_frozen if training_steps is None else plan.policy
            policy = build_engine(
                plan.source.load(args, plan.compute, ds_config, self.context.tell),
                args,
                ds_config,
                training_steps=training_steps,
                optimizers=self.optimizers,
                aux_loss=self.aux_coefficient is not None,
                architecture=self.context.method.architecture,
            )
            built.pop_all()
        return Models(policy, reference)

    def close(self) -> None:
        """Release the engines. Trained weights go with them, so the trainer is then at its end: save before.

        A live model keeps what training set: its trained weights (partitioned still under ZeRO-3), dropout at 0,
        checkpointing, and a head that also answers with log-probs.
        """
        self.companion.close()
        if self.models is not None:
            self.models.close()
        self.models = self._pass = None
        self._trainable = False
        handler = self.context.events.handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, None, None
