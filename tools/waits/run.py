"""Count the device synchronizations of a training run, per micro-batch and per step.

The same run is made with windows of two and of four micro-batches; the difference is the cost of a micro-batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.utils.checkpoint as checkpoint
from deepspeed.accelerator import get_accelerator

from alignment.rollout.engine import RolloutEngine
from alignment.training.loop import TrainingLoop
from alignment.training.trainer import AlignmentTrainer
from tools.waits.device import DEVICE, StandIn, Wait, as_host, caller

COUNTED = 3  # the counted step; in earlier steps, optimizers create their states and DeepSpeed's timer is inactive
STEPS = COUNTED + 1  # steps of a run; the time between two steps belongs to the first one
FEW, MANY = 2, 4  # micro-batches per window
OWNERS = ("ours", "transformers", "deepspeed")


class Share(NamedTuple):
    """Number of synchronizations per micro-batch, and additional ones per step."""

    micro_batch: float
    step: float


class _Event:
    """Replaces ``torch.cuda.Event``; it is always complete."""

    def __init__(self, stand_in: StandIn, *args: Any, **kwargs: Any) -> None:
        self._stand_in = stand_in

    def record(self, *args: Any) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return whether the device has reached the event."""
        return True

    def synchronize(self) -> None:
        """Record a synchronization."""
        self._stand_in.wait("synchronize")

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds."""
        return 0.0


@contextlib.contextmanager
def standing_in() -> Iterator[StandIn]:
    """Use the simulated device as the accelerator within this context. Enter it before creating a trainer."""
    stand_in, accelerator = StandIn(), type(get_accelerator())

    def synchronize(*args: Any, **kwargs: Any) -> None:
        stand_in.wait("synchronize")

    def typed(dtype: torch.dtype) -> property:
        return property(lambda self: functools.partial(torch.tensor, dtype=dtype, device=DEVICE))

    replaced: list[tuple[Any, str, Any]] = [
        (accelerator, "device_name", _device_name),
        (accelerator, "current_device_name", lambda self: str(DEVICE)),
        (accelerator, "synchronize", synchronize),
        (accelerator, "FloatTensor", typed(torch.float32)),
        (accelerator, "ByteTensor", typed(torch.uint8)),
        (torch.cuda, "synchronize", synchronize),
        (torch.cuda, "reset_peak_memory_stats", lambda *args: None),
        (torch.cuda, "max_memory_allocated", lambda *args: 0),
        (torch.cuda, "Event", functools.partial(_Event, stand_in)),
        (torch.distributed, "barrier", synchronize),
        (torch, "get_rng_state", _kept_on_host(torch.get_rng_state)),  # of a generator on either side
        (torch, "from_numpy", _kept_on_host(torch.from_numpy)),
    ]
    # torch takes a mode off the stack while one of its functions runs, and ``backward`` runs a whole pass.
    replaced.append((torch.autograd, "_engine_run_backward", _within(stand_in, torch.autograd._engine_run_backward)))
    for name in ("all_gather_object", "broadcast_object_list"):
        replaced.append((torch.distributed, name, _uncounted(stand_in, getattr(torch.distributed, name), waits=True)))
    with contextlib.ExitStack() as patched:
        for owner, name, value in replaced:
            patched.enter_context(mock.patch.object(owner, name, value))
        # It synchronizes for every token anyway.
        patched.enter_context(
            mock.patch.object(RolloutEngine, "generate", _uncounted(stand_in, RolloutEngine.generate))
        )
        # A recomputation is compared with its forward by shape, dtype and device, and torch looks at the last of them
        # now inside of one of its functions, now outside.
        patched.enter_context(mock.patch.dict(checkpoint._allowed_determinism_checks_to_fns, {"default": _shape}))
        patched.enter_context(stand_in)
        yield stand_in


def _device_name(accelerator: Any, device_index: int | None = None) -> str:
    """Return the device name for DeepSpeed, or the device type for other callers."""
    return str(DEVICE) if caller()[0] == "deepspeed" else DEVICE.type


def _kept_on_host(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a function whose results the mode cannot observe, and assign them to the host."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> torch.Tensor:
        return as_host(function(*args, **kwargs))

    return called


def _shape(tensor: torch.Tensor) -> dict[str, Any]:
    return {"shape": tensor.shape, "dtype": tensor.dtype}


def _within(stand_in: StandIn, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to run it with the mode on the stack."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with stand_in:
            return function(*args, **kwargs)

    return called


def _uncounted(stand_in: StandIn, function: Callable[..., Any], *, waits: bool = False) -> Callable[..., Any]:
    """Count nothing within a function, or one synchronization: for a collective of Python objects."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if waits:
            stand_in.wait("objects of other ranks")
        before, stand_in.counting = stand_in.counting, False
        try:
            return function(*args, **kwargs)
        finally:
            stand_in.counting = before

    return called


def waits_of(make: Callable[[int], AlignmentTrainer]) -> dict[int, list[Wait]]:
    """Return the synchronizations of step :data:`COUNTED` for windows of :data:`FEW` and :data:`MANY` micro-batches.

    ``make`` creates a trainer with :data:`STEPS` steps and the given number of equal micro-batches per window.
    """
    found = {}
    for number in (FEW, MANY):
        with standing_in() as stand_in:
            trainer = make(number)
            trainer.phases._cuda = torch.device("cuda")
            with mock.patch.object(TrainingLoop, "_update", _numbered(stand_in, TrainingLoop._update)):
                trainer.train()
            stand_in.counting = False
            trainer.close()
        found[number] = [wait for wait in stand_in.waits if wait.step == COUNTED]
    return found


def _numbered(stand_in: StandIn, step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``TrainingLoop._update``, which takes a step, to count steps."""

    @functools.wraps(step)
    def called(*args: Any, **kwargs: Any) -> Any:
        stand_in.step += 1
        return step(*args, **kwargs)

    return called


def shares(found: dict[int, list[Wait]]) -> dict[str, Share]:
    """Return the cost of a micro-batch and of a step by owner; owners not in :data:`OWNERS` count as ``ours``."""
    counts = {
        number: Counter(wait.owner if wait.owner in OWNERS else "ours" for wait in waits)
        for number, waits in found.items()
    }
    result = {}
    for owner in OWNERS:
        few, many = (counts[number][owner] for number in (FEW, MANY))
        each = (many - few) / (MANY - FEW)
        result[owner] = Share(each, few - FEW * each)
    return result


def places(waits: list[Wait]) -> list[tuple[int, str]]:
    """Return the number of synchronizations by place, most frequent first."""
    counted = Counter(f"{wait.owner:12} {wait.kind:20} {wait.place}" for wait in waits)
    return [(number, place) for place, number in counted.most_common()]
