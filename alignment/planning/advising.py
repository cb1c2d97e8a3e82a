"""Plan a run from its options, and look for changes with which it fits."""

from __future__ import annotations

import dataclasses
from typing import Any

from alignment.config.errors import AlignmentError
from alignment.config.options import AlignmentConfig
from alignment.config.options_online import OnlineOptions
from alignment.config.registry import METHODS
from alignment.models.source import model_source
from alignment.models.tasks import CLASSIFIER
from alignment.planning.changes import Change, possible, sufficient
from alignment.planning.engines import plan_engines
from alignment.planning.plan import Frozen, MemoryPlan, NotPlanned, Planner
from alignment.training.arguments import balancing_coefficient, model_sources


class Adviser:
    """Plans the run of some options, and of changed ones.

    Args:
        options: the options.
        ranks: number of GPUs.
        hosts: number of hosts.
        kernel: attention kernel.
        card: bytes of a GPU.
        memory: bytes of a host's memory.
    """

    def __init__(
        self, options: AlignmentConfig, ranks: int, hosts: int, kernel: str, card: float, memory: float
    ) -> None:
        self.options, self.ranks, self.hosts, self.kernel = options, ranks, hosts, kernel
        self.card, self.memory = card, memory
        self.method = METHODS.trainer(options).method_class(options)
        self.policy, self.reference = model_sources(
            options.model_name_or_path, None, options, self.method.needs_reference, self.method.task
        )
        self._planners: dict[str, Planner] = {}

    def planner(self, options: AlignmentConfig) -> Planner:
        """Return a planner for options of the same models."""
        reference = self.reference if self.method.needs_reference else None
        engines = plan_engines(options, self.policy, reference)
        return Planner(
            options,
            self.method,
            engines,
            self.ranks,
            self.hosts,
            self._rewards(options),
            self.kernel,
            balancing_coefficient(options, self.policy.config) is not None,
        )

    def plan(self, tokens: int | None = None) -> tuple[MemoryPlan, int, list[Change]]:
        """Return the plan, the longest sequences that fit, and if the plan does not fit, changes so that it does.

        Raises:
            ModelError: the model cannot be counted.
        """
        planner = self.planner(self.options)
        checkpointed = self._recomputed(planner, tokens)
        plan = planner.plan(tokens, checkpointed)
        longest = planner.longest_that_fits(self.card, self.memory, plan.layers if self._free else checkpointed)
        changes: list[Change] = []
        if not plan.fits(self.card, self.memory):
            stage = int(planner.engines.policy["zero_optimization"]["stage"])
            single = possible(self.options, stage, self.ranks, planner.engines.adapters is not None)
            changes = sufficient(
                list(single), lambda change: self._changed(change, tokens), lambda one: one.fits(self.card, self.memory)
            )
        return plan, longest, changes

    @property
    def _free(self) -> bool:
        """Whether the number of recomputed layers may be chosen."""
        return self.options.gradient_checkpointing == "auto"

    def _recomputed(self, planner: Planner, tokens: int | None) -> int | None:
        return planner.layers_to_recompute(self.card, tokens) if self._free else None

    def _changed(self, change: Change, tokens: int | None) -> MemoryPlan | None:
        try:
            options = dataclasses.replace(self.options, **change.options)
            planner = self.planner(options)
            limit = tokens if "max_length" not in change.options else None
            return planner.plan(limit, self._recomputed(planner, limit))
        except (AlignmentError, NotPlanned):
            return None  # the options contradict each other

    def _rewards(self, options: AlignmentConfig) -> tuple[Frozen, ...]:
        path = getattr(options, "reward_model_path", None)
        if not isinstance(options, OnlineOptions) or path is None:
            return ()
        source = model_source(path, "reward_model_path", options, task=CLASSIFIER)
        rows = options.reward_batch_size or 2 * options.per_device_train_batch_size
        return (Frozen("reward model", source, options.reward_placement or "offload", "score", rows),)
