"""torch: the process group's store and time limit, modules' hooks, dropouts, compiled extensions, warnings."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard
from unittest import mock

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import Store
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR


def default_store() -> Store:
    """The store of the default process group.

    Rank 0's may serve the other ranks, for as long as someone holds it: a guard that talks over the same address must
    outlive the group. torch offers no public way to it. Seen with torch 2.13.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def set_group_timeout(timeout: timedelta) -> None:
    """Set how long a rank waits for the others in a collective of the default group, once the group exists.

    ``init_process_group`` takes one limit for the meeting of the ranks and for everything after it; here the meeting
    should fail soon, and a rank that waits for another one's long work should not. Seen with torch 2.13.
    """
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timeout)


def is_dropout(module: nn.Module) -> TypeGuard[nn.Dropout]:
    """Whether a module is one of torch's dropouts, of any dimension.

    Their common base is private; a list of its subclasses would miss the next one. Seen with torch 2.13.
    """
    from torch import nn

    return isinstance(module, nn.modules.dropout._DropoutNd)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written into.

    Autograd counts it, to notice what it had saved for the backward pass being overwritten. Seen with torch 2.13.
    """
    return int(tensor._version)


def take_scheduled_rates(scheduler: LambdaLR) -> None:
    """Give the optimizer the rates of its schedule at the present step, whatever it had.

    A schedule sets them as it steps; one that was restored at a step of another schedule's has not stepped there. What
    ``get_last_lr`` returns is an attribute that torch keeps to itself. Seen with torch 2.13.
    """
    rates = [base * rate(scheduler.last_epoch) for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
    for group, value in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = value
    scheduler._last_lr = rates


@contextlib.contextmanager
def without_forward_hooks(module: nn.Module, unwanted: Callable[[Any], bool]) -> Iterator[None]:
    """Put the unwanted forward hooks of all modules aside; other hooks stay, and all keep their order on any exit.

    The handles that could remove them belong to whoever registered them, and a hook that is registered again runs
    last. Seen with torch 2.13.
    """
    put_aside: list[tuple[dict[int, Any], dict[int, Any]]] = []
    try:
        for part in module.modules():
            for hooks in (part._forward_pre_hooks, part._forward_hooks):
                put_aside.append((hooks, dict(hooks)))
                for key in [key for key, hook in hooks.items() if unwanted(hook)]:
                    del hooks[key]
        yield
    finally:
        for hooks, before in put_aside:
            hooks.clear()
            hooks.update(before)


def cuda_toolkit() -> str | None:
    """The folder of the CUDA toolkit that torch compiles extensions with; None if there is none, or torch is for CPUs.

    torch documents the environment variable, and keeps what it found without it to itself. Seen with torch 2.13.
    """
    from torch.utils import cpp_extension

    found: str | None = cpp_extension.CUDA_HOME
    return found


@contextlib.contextmanager
def looking_before_builds(look: Callable[[Path], None]) -> Iterator[None]:
    """Within this context ``look`` is called with the lock of an extension that another process compiles.

    When it returns, the lock is tried again. torch itself waits without a limit for the file to vanish, which a
    process that was killed leaves behind (pytorch #189245), and then loads what may not have been built. The process
    that holds a lock keeps its file open. Seen with torch 2.13.
    """
    from torch.utils.file_baton import FileBaton

    acquire = FileBaton.try_acquire

    def try_acquire(baton: FileBaton) -> bool:
        while not acquire(baton):
            look(Path(baton.lock_file_path))
        return True

    with mock.patch.object(FileBaton, "try_acquire", try_acquire):
        yield


@contextlib.contextmanager
def schedule_may_go_first() -> Iterator[None]:
    """Within this context a scheduler may step before its optimizer has.

    torch warns of it, rightly in general, and tells by the message alone what it warns of. Seen with torch 2.13.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        yield


def hush_deprecated_collectives() -> None:
    """Silence the warnings about deprecated functions of ``torch.distributed``, which DeepSpeed calls.

    They share their class with every other ``FutureWarning``, so the message has to tell. Seen with torch 2.13 and
    DeepSpeed 0.19.8.
    """
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def first_states(optimizer: Optimizer, group: int, example: Tensor) -> dict[str, Any]:
    """The states that an optimizer makes for a tensor at its first step, without changing the optimizer.

    There is no other way to ask: optimizers allocate while they step. Its attributes, states and groups among them,
    are put aside meanwhile, and the step is taken from under the wrappers that torch puts around it (hooks, the
    profiler), so that no hook of the user's runs and no schedule counts it. Seen with torch 2.13.

    Args:
        optimizer: any.
        group: number of the parameter group whose settings count.
        example: stepped on, with a gradient of zero.
    """
    import torch

    attributes = dict(vars(optimizer))
    example.grad = torch.zeros_like(example)
    optimizer.state, optimizer.param_groups = (
        defaultdict(dict),
        [{**optimizer.param_groups[group], "params": [example]}],
    )
    try:
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(optimizer)
        return dict(optimizer.state[example])
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
