"""The rollout: completions of this rank's prompts by the policy inside its training engine."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from deepspeed.accelerator import get_accelerator
from transformers import PreTrainedModel

from alignment.config.errors import OptionError
from alignment.engines.collectives import largest_numbers
from alignment.engines.optimizers import bytes_to_come
from alignment.engines.rng import seeded
from alignment.engines.scoring import ScoringEngine
from alignment.rollout.backend import (
    Completion,
    Generation,
    Rollout,
    RolloutBackend,
    RolloutRequest,
    Sampling,
    Work,
    chunks,
)
from alignment.rollout.continuous import ContinuousBackend
from alignment.rollout.generate import GenerateBackend
from alignment.rollout.memory import Room, measure_room
from alignment.rollout.processors import neutral_defaults
from alignment.rollout.weights import weights_by_layer, whole_weights
from alignment.run.activity import ACTIVITY
from alignment.run.stop import REQUESTS, Cut


@functools.cache
def backends() -> tuple[RolloutBackend, ...]:
    """All backends, which keep nothing between rollouts, in the order of preference of ``auto``. Add new ones here."""
    return ContinuousBackend(), GenerateBackend()


def choose_backend(asked: str, model: PreTrainedModel, sampling: Sampling, *, whole: bool = True) -> RolloutBackend:
    """The backend that ``rollout_backend`` selects; ``auto``: the first usable one that is worthwhile.

    Args:
        asked: a name, or ``auto``.
        model: the policy's model.
        sampling: the sampling distribution.
        whole: whether every rank has unsharded weights during a rollout.

    Raises:
        OptionError: the selected backend is not usable; the message gives the reason.
    """
    if asked == "auto":
        return next(one for one in backends() if one.pays(model) and _obstacle(one, model, sampling, whole) is None)
    named = next(one for one in backends() if one.name == asked)
    obstacle = _obstacle(named, model, sampling, whole)
    if obstacle is not None:
        raise OptionError(f"rollout_backend={asked!r}: {obstacle}")
    return named


def _obstacle(backend: RolloutBackend, model: PreTrainedModel, sampling: Sampling, whole: bool) -> str | None:
    reason = backend.obstacle(model, sampling)
    if reason is not None:
        return f"{reason}; set rollout_backend: generate"
    if backend.needs_whole_weights and not whole:
        return (
            "it needs unsharded weights, but ZeRO-3 gathers them layer by layer here; set ds3_gather_for_generation: "
            "true, or rollout_backend: generate"
        )
    return None


class RolloutEngine(Rollout):
    """Generates with the policy's own weights; all changes to the engine are undone on any exit.

    The first rollout fixes, for the rest of the run, the settings that depend on free memory: by then everything
    permanent has been allocated except the optimizer's states, whose size is known. On a machine whose free memory
    varies, a run is exactly reproducible only with ``batch_size`` and ``gather`` set.

    Args:
        policy: the training engine; None until :meth:`attach`.
        backend: value of ``rollout_backend``, including ``auto`` (:func:`choose_backend`).
        batch_size: completions generated at the same time on each rank; None: as many as fit.
        gather: whether ZeRO-3 gathers all weights for a rollout; None: if they fit (:func:`.memory.measure_room`).
        longest_context: maximum length of prompt and completion together, in tokens.
    """

    def __init__(
        self,
        policy: ScoringEngine | None = None,
        backend: str = "auto",
        *,
        batch_size: int | None = None,
        gather: bool | None = None,
        longest_context: int,
    ) -> None:
        self._policy = policy
        self._asked, self._batch_size, self._gather = backend, batch_size, gather
        self._longest_context = longest_context
        self.backend: RolloutBackend | None = None
        self.room: Room | None = None

    @property
    def policy(self) -> ScoringEngine:
        """The training engine."""
        assert self._policy is not None
        return self._policy

    def attach(self, policy: ScoringEngine) -> None:
        """See :class:`Rollout`; the next rollout is the first one with this policy."""
        self._policy, self.room, self.backend = policy, None, None

    def update(self, version: str) -> None:
        """See :class:`Rollout`; the policy itself generates."""

    def close(self) -> None:
        """See :class:`Rollout`."""
        self._policy = None

    def generate(self, request: RolloutRequest) -> list[list[Completion]]:
        """See :class:`Rollout`. It is OptionError if the backend does not support gathering layer by layer."""
        room, backend = self.decide(request)
        parts = chunks(request, room.batch_size)
        by_layer = self.policy.partitioned and not room.gather
        if by_layer:  # all ranks must gather layers equally often: add chunks of one dummy token
            dummy = Work(-1, (request.sampling.pad_token_id,), 1)
            parts += [[dummy]] * (int(largest_numbers([len(parts)])[0]) - len(parts))
        generation = Generation(self._model, request.sampling, self.policy.device, by_layer, ACTIVITY.progress)
        results: list[list[Completion]] = [[] for _ in request.prompts]
        cut = False
        try:
            with self._ready(request.seed, by_layer), backend.session(parts, generation):
                for part in parts:
                    cut = self._asked_to_stop(together=by_layer)
                    if cut:
                        break
                    if part[0].prompt < 0:  # a dummy runs as long as the other ranks do
                        short = replace(request.sampling, max_new_tokens=1, extra={})
                        backend.generate(part, replace(generation, sampling=short))
                        continue
                    for work, completions in zip(part, backend.generate(part, generation)):
                        results[work.prompt] += completions
        finally:
            # A cache that grew token by token leaves the allocator fragmented.
            get_accelerator().empty_cache()
        if REQUESTS.may_cut and largest_numbers([cut]) != [0.0]:
            raise Cut
        return results

    def _asked_to_stop(self, *, together: bool) -> bool:
        """Whether to abandon the rollout here; with ``together``, all ranks check at the same time and agree."""
        if not REQUESTS.may_cut:
            return False
        asked = REQUESTS.asked() is not None
        return largest_numbers([asked]) != [0.0] if together else asked

    @contextlib.contextmanager
    def rehearsing(self, longest: Callable[[int], RolloutRequest]) -> Iterator[None]:
        """Measure the memory for rollouts before a rehearsal; the first rollout of the run measures it again."""
        before = self.room, self.backend
        self.decide(longest(1))
        try:
            yield
        finally:
            self.room, self.backend = before

    def rehearse(self, longest: Callable[[int], RolloutRequest], most: int) -> None:
        """See :class:`Rollout`; within :meth:`rehearsing`."""
        assert self.room is not None
        self.generate(longest(min(-(-self.room.batch_size // longest(1).num_generations), most)))

    def describe(self) -> str:
        """The settings fixed by the first rollout, for the log; empty before it."""
        if self.room is None or self.backend is None:
            return ""
        way = "once per rollout" if self.room.gather else "layer by layer"
        gathered = f", weights gathered {way}" if self.policy.partitioned else ""
        return f"{self.backend.name}, up to {self.room.batch_size} completions at a time per rank{gathered}"

    def state_dict(self) -> dict[str, Any]:
        """State to save: the settings fixed by the first rollout; empty before it."""
        if self.room is None or self.backend is None:
            return {}
        return {"backend": self.backend.name, **asdict(self.room)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the settings of a saved state, regardless of the memory available now."""
        if state:
            self.backend = next(one for one in backends() if one.name == state["backend"])
            self.room = Room(gather=state["gather"], batch_size=state["batch_size"])

    @property
    def _model(self) -> PreTrainedModel:
        return self.policy.scorer.model

    def decide(self, request: RolloutRequest) -> tuple[Room, RolloutBackend]:
        """Return what the first rollout fixes, and measure the available memory at the first call. Collective."""
        if self.room is None or self.backend is None:
            likely = choose_backend(self._asked, self._model, request.sampling)
            room = measure_room(
                self._model,
                self._longest_context,
                gather=self._gather,
                batch_size=self._batch_size,
                generations=request.num_generations,
                page=likely.page_tokens(self._model),
                to_come=bytes_to_come(self.policy.engine, self.policy.device),
            )
            whole = room.gather or not self.policy.partitioned
            self.backend = choose_backend(self._asked, self._model, request.sampling, whole=whole)
            self.room = room
        return self.room, self.backend

    @contextlib.contextmanager
    def _ready(self, seed: int, by_layer: bool) -> Iterator[None]:
        """Enter eval mode, gather weights as needed, and seed the generators."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.policy.inference())
            stack.enter_context(seeded(seed))
            stack.enter_context(neutral_defaults(self._model))
            if by_layer:
                stack.enter_context(weights_by_layer(self.policy))
            elif self.policy.partitioned:
                stack.enter_context(whole_weights(self.policy))
            yield
