"""A simulated device: a mode of torch functions that distinguishes host tensors from device tensors.

The device is called ``cpu:0`` and the host ``cpu``; torch computes both in the same memory. A tensor belongs to the
host if it was created without a device, from data or from host tensors only; all other tensors, including weights and
gradients, belong to the device. Moving a tensor makes a copy, as on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DEVICE, HOST = torch.device("cpu:0"), torch.device("cpu")
_SIDE, _PINNED = "_waits_on_host", "_waits_pinned"
_OWNERS = ("alignment", "deepspeed", "transformers", "peft", "bitsandbytes")

# Operations for which the host waits: they return a value, or a size that depends on values.
_VALUES = "item tolist numpy __bool__ __int__ __float__ __index__ __contains__ equal allclose is_nonzero"
_SIZES = "nonzero argwhere masked_select unique unique_consecutive bincount"
_READS = {**dict.fromkeys(_VALUES.split(), "a value"), **dict.fromkeys(_SIZES.split(), "a size")}
_FACTORIES = frozenset(
    "tensor as_tensor asarray scalar_tensor zeros ones empty full arange linspace eye rand randn randint randperm "
    "from_numpy frombuffer empty_strided tril_indices triu_indices".split()
)


class Wait(NamedTuple):
    """A device synchronization: its cause (``ours`` for this project), kind, file and line, and step, or 0 before."""

    owner: str
    kind: str
    place: str
    step: int


def caller() -> tuple[str, str]:
    """Return the name, file and line of the innermost frame of a known package."""
    frame = sys._getframe(1)
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        for owner in _OWNERS:
            if owner in parts[:-1]:
                name = "/".join(parts[len(parts) - 1 - parts[::-1].index(owner) :])
                return ("ours" if owner == "alignment" else owner), f"{name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "elsewhere", "?"


def on_host(tensor: Tensor) -> bool:
    """Return whether a tensor belongs to the host."""
    return bool(getattr(tensor, _SIDE, False))


def as_host(tensor: Tensor) -> Tensor:
    """Mark a tensor as belonging to the host, and return it."""
    setattr(tensor, _SIDE, True)
    return tensor


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


class StandIn(TorchFunctionMode):
    """Simulates the device within this context, and records synchronizations in ``waits`` while it is ``counting``."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Wait] = []
        self.counting = True
        self.step = 0

    def wait(self, kind: str) -> None:
        """Record a synchronization."""
        if self.counting:
            owner, place = caller()
            self.waits.append(Wait(owner, kind, place, self.step))

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "__get__" and attribute == "device":
            if (real := func(*args, **kwargs)).type != "cpu":
                return real  # meta: tensors that transformers has not initialized yet
            return HOST if on_host(args[0]) else DEVICE
        if name == "__set__" and attribute == "data":
            setattr(args[0], _SIDE, on_host(args[1]))
            return func(*args, **kwargs)
        if name in ("to", "cpu", "cuda"):
            return self._moved(func, name, args, kwargs)
        if name in ("pin_memory", "is_pinned"):
            return self._pinned(name, args[0])
        if name == "copy_":
            self._copied(args[0], args[1], kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        self._read(name, args, kwargs)
        pinned = kwargs.pop("pin_memory", False) if name in _FACTORIES or name.startswith("new_") else False
        if pinned:
            kwargs["device"] = HOST
        result = func(*args, **kwargs)
        if name in _FACTORIES or name.startswith("new_"):
            self._made(name, result, args, kwargs, bool(pinned))
        else:
            self._follow(result, args, kwargs)
        return result

    def _read(self, name: str, args: Any, kwargs: Any) -> None:
        """Record operations that need a value of a device tensor."""
        device = [each for each in _tensors(args) if not on_host(each)]
        if not device:
            return
        if name in _READS:
            self.wait(_READS[name])
        elif name == "where" and len(args) == 1:
            self.wait("a size")
        elif name == "repeat_interleave" and kwargs.get("output_size") is None and len(list(_tensors(args))) > 1:
            self.wait("a size")
        elif name in ("__getitem__", "__setitem__"):
            for index in _tensors(args[1]):
                if index.dtype in (torch.bool, torch.uint8) and not on_host(index):
                    if name == "__getitem__" or isinstance(args[2], Tensor) and args[2].ndim:
                        self.wait("a size")
                elif on_host(index) and not on_host(args[0]):
                    self.wait("a pageable copy")
                elif not index.ndim and not on_host(index):
                    self.wait("a value")
            if name == "__setitem__" and isinstance(args[2], Tensor) and args[2].ndim:
                self._copied(args[0], args[2], False)

    def _copied(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        if on_host(target) != on_host(source):
            self._crossed(source if on_host(source) else target, to_host=on_host(target), non_blocking=non_blocking)

    def _crossed(self, host: Tensor | None, *, to_host: bool, non_blocking: bool) -> None:
        """Record a copy between host and device; only copies with pinned memory are asynchronous."""
        pinned = host is not None and bool(getattr(host, _PINNED, False))
        if not (non_blocking and pinned):
            self.wait("a copy to the host" if to_host else "a pageable copy")

    def _moved(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        source = args[0]
        if not isinstance(source, Tensor):
            return func(*args, **kwargs)
        target = HOST if name == "cpu" else DEVICE if name == "cuda" else self._target(args[1:], kwargs)
        result = func(*args, **kwargs)
        host = on_host(source)
        if target is None or (target == HOST) == host:
            setattr(result, _SIDE, host)
            return result
        non_blocking = kwargs.get("non_blocking", any(isinstance(value, bool) for value in args[2:]) and args[2])
        self._crossed(source if host else None, to_host=not host, non_blocking=bool(non_blocking))
        result = result.clone() if result is source else result
        setattr(result, _SIDE, not host)
        return result

    def _target(self, args: Any, kwargs: Any) -> torch.device | None:
        where = kwargs.get("device", args[0] if args else None)
        if isinstance(where, Tensor):
            return HOST if on_host(where) else DEVICE
        if isinstance(where, str):
            where = torch.device(where)
        if isinstance(where, int):
            return DEVICE
        return where if isinstance(where, torch.device) and where.type == "cpu" else None

    def _pinned(self, name: str, tensor: Tensor) -> Any:
        if name == "is_pinned":
            return bool(getattr(tensor, _PINNED, False))
        copy = tensor.clone()
        setattr(copy, _SIDE, True)
        setattr(copy, _PINNED, True)
        return copy

    def _made(self, name: str, result: Tensor, args: Any, kwargs: Any, pinned: bool) -> None:
        """Handle a newly created tensor. Python numbers are copied to the device from pageable memory."""
        of = args[0] if name.startswith("new_") else None
        where = kwargs.get("device")
        if where is None:
            host = on_host(of) if isinstance(of, Tensor) else True
        else:
            host = torch.device(where) == HOST
        data = name in ("tensor", "as_tensor", "asarray", "new_tensor")
        given = args[0] if data and args and name != "new_tensor" else None
        if data and isinstance(given, Tensor):
            if on_host(given) != host:
                self._crossed(given if on_host(given) else None, to_host=host, non_blocking=False)
        elif data and not host:
            self.wait("a pageable copy")
        setattr(result, _SIDE, host)
        setattr(result, _PINNED, pinned)

    def _follow(self, result: Any, args: Any, kwargs: Any) -> None:
        """Assign a result to the host if all of its inputs belong to the host."""
        made = list(_tensors(result))
        if not made:
            return
        given = [*_tensors(args), *_tensors(kwargs)]
        where = kwargs.get("device")
        host = bool(given) and all(map(on_host, given)) if where is None else torch.device(where) == HOST
        for each in made:
            if not any(each is one for one in given):
                setattr(each, _SIDE, host)
