"""torch: process group, module hooks, dropouts, compiled extensions, allocators, warnings."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import Store
    from torch.optim.lr_scheduler import LambdaLR


def default_store() -> Store:
    """The store of the default process group.

    Rank 0's may serve the other ranks as long as it is referenced: a guard that uses the same address must outlive the
    group. torch has no public access to it. Seen with torch 2.13.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def set_group_timeout(timeout: timedelta) -> None:
    """Set the timeout of collectives in the default group, once the group exists.

    ``init_process_group`` takes one timeout for the rendezvous and for everything after it; here the rendezvous should
    fail quickly, but a rank that waits for another one's long work should not. Seen with torch 2.13.
    """
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timeout)


def is_dropout(module: nn.Module) -> TypeGuard[nn.Dropout]:
    """Whether a module is one of torch's dropouts, of any dimension.

    Their common base class is private; a list of its subclasses would miss new ones. Seen with torch 2.13.
    """
    from torch import nn

    return isinstance(module, nn.modules.dropout._DropoutNd)


def version_of(tensor: Tensor) -> int:
    """The number of in-place modifications of a tensor.

    Autograd counts them to detect that a tensor saved for the backward pass was overwritten. Seen with torch 2.13.
    """
    return int(tensor._version)


def take_scheduled_rates(scheduler: LambdaLR) -> None:
    """Set the optimizer's learning rates to those of the schedule at the present step.

    A schedule sets them when it steps; one restored at a step of another schedule has not stepped there. The result of
    ``get_last_lr`` is a private attribute. Seen with torch 2.13.
    """
    rates = [base * rate(scheduler.last_epoch) for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
    for group, value in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = value
    scheduler._last_lr = rates


@contextlib.contextmanager
def without_forward_hooks(module: nn.Module, unwanted: Callable[[Any], bool]) -> Iterator[None]:
    """Remove unwanted forward hooks of all modules; restore all hooks in their order on any exit.

    The handles that could remove them belong to the code that registered them, and a hook that is registered again
    runs last. Seen with torch 2.13.
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


def has_cuda_compiler() -> bool:
    """Whether the CUDA toolkit that torch compiles extensions with exists and has a compiler, unlike a runtime's.

    The environment variable is documented, but not where torch stores the folder that it finds without it. Seen with
    torch 2.13.
    """
    from torch.utils import cpp_extension

    home: str | None = cpp_extension.CUDA_HOME
    return home is not None and shutil.which("nvcc", path=f"{home}/bin") is not None


def allocator_settings() -> str:
    """The settings of torch's allocators that this process has applied; empty if none, or if torch does not tell.

    There is no public access. torch reads the environment once: at the first allocation, or at this call. Seen with
    torch 2.13.
    """
    import torch

    told: Callable[[], str] = getattr(torch._C, "_accelerator_getAllocatorSettings", str)
    return told()


def set_allocator_settings(settings: str) -> None:
    """Configure torch's allocators; every setting that is not mentioned gets its default.

    The environment variable for this is read before the first allocation only. ``torch.cuda.memory`` has a function
    as well, which is private and deprecated since torch 2.9. Seen with torch 2.13.
    """
    import torch

    current = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (current or torch.cuda.memory._set_allocator_settings)(settings)


def release_pinned_memory() -> None:
    """Return the page-locked host memory that torch keeps for reuse to the system. No effect without CUDA.

    torch keeps every block that is freed. The function is public, under another name, in recent releases only. Seen
    with torch 2.13.
    """
    import torch

    if not torch.cuda.is_initialized():
        return
    public = getattr(torch.accelerator, "empty_host_cache", None)
    release = public or getattr(torch._C, "_host_emptyCache", None)
    if release is not None:
        release()


@contextlib.contextmanager
def schedule_may_go_first() -> Iterator[None]:
    """Allow, within this context, a scheduler to step before its optimizer.

    torch warns about it, rightly in general, and the warning is identified only by its message. Seen with torch 2.13.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        yield


def stop_workers(iterator: Iterator[Any]) -> None:
    """End the worker processes of a data loader's iterator; nothing if it has none.

    Otherwise they end when the iterator is deleted, which a traceback that refers to it delays beyond Python's exit.
    The exit sends them SIGTERM, which ours ignore, and joins them without a timeout. Seen with torch 2.13.
    """
    workers = getattr(iterator, "_workers", ())
    if workers:
        iterator._shutdown_workers()  # type: ignore[attr-defined]
    for worker in workers:
        worker.kill()


def hush_deprecated_collectives() -> None:
    """Silence the warnings about deprecated functions of ``torch.distributed`` that DeepSpeed calls.

    They share their class with every other ``FutureWarning``, so they are identified by the message. Seen with torch
    2.13 and DeepSpeed 0.19.8.
    """
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def storage_key(tensor: Any) -> int:
    """Return a key that is equal for tensors that share memory while it lives, also for tensors without data.

    ``data_ptr()`` is 0 for all meta tensors, and there is no public identity of a storage. Seen with torch 2.13.
    """
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def watching_operations(see: Callable[[Tensor], None]) -> Iterator[None]:
    """Call ``see`` with every tensor that an operation returns within this context, those of backward passes included.

    A dispatch mode is the only way to see them. Its module has an underscore, but torch documents it in its notes on
    extending. Seen with torch 2.13.
    """
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            for value in tree_iter(output):
                if isinstance(value, Tensor):
                    see(value)
            return output

    with Watch():
        yield
