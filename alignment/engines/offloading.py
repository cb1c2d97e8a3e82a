"""Keep the hidden states that gradient checkpointing saves in host memory between the forward and the backward pass.

Hooks of autograd around a layer see what checkpointing saves of it, its inputs: what is within has hooks of its own
(non-reentrant) or is not saved (reentrant). Hidden states, the first input, move. The others, such as position
embeddings, are the same tensors for all layers. DeepSpeed's ``offload_activations`` is not used because it supports
non-reentrant checkpointing only and keeps buffers of each exact shape, so that varying lengths multiply host memory;
TRL's and torchtune's ``OffloadActivations`` because it moves whatever autograd saves, each tensor into page-locked
memory that torch rounds up to a power of two; torch's ``save_on_cpu`` because it does too, and waits for each copy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from alignment.config.errors import OptionError, counted
from alignment.engines.memory import page_locked
from alignment.internals.torch import storage_key
from alignment.internals.transformers import checkpoint_function, set_checkpoint_function
from alignment.models.partitioning import decoder_layers
from alignment.models.scorer import Scorer

_KEY = "activation_offloading"
PENDING = 2  # copies that may be pending, each with its hidden states on the device


def check_host_memory(size: int, ranks: int = 1) -> None:
    """Raise :class:`OptionError` if each of ``ranks`` ranks of this host cannot have ``size`` bytes of its memory."""
    available = psutil.virtual_memory().available
    if size * ranks > available:
        raise OptionError(
            f"{_KEY}=True: the hidden states of a micro-batch take {size * ranks / 1e9:.2f} GB of host memory "
            f"({counted(ranks, 'rank')}), of which {available / 1e9:.2f} GB are available; set "
            "per_device_train_batch_size or max_length to a smaller number"
        )


class Copies:
    """Copies between a device and host memory, in their order. Here the device is the host: they are synchronous."""

    def start(self, target: Tensor, source: Tensor) -> Any:
        """Copy once the device has computed ``source`` and no longer uses ``target``; return a handle of the copy.

        Until :meth:`wait` is called with it, neither may be freed or written to, and ``target`` not be read.
        """
        target.copy_(source)

    def wait(self, copy: Any) -> None:
        """Let the device's computation continue only after the copy."""

    def finish(self) -> None:
        """Return after all copies."""


class CudaCopies(Copies):
    """Copies of a GPU, on a stream of their own, beside its computation."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def start(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, copy: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(copy)

    def finish(self) -> None:
        self._stream.synchronize()


class _Moving(NamedTuple):
    """Hidden states on the device, by their number, and the copy that reads or writes them."""

    number: int
    tensor: Tensor
    copy: Any


class ActivationOffloading:
    """Moves the hidden states that a policy's recomputed layers save to host memory, and back one layer ahead.

    At most two of them are on the device: in the forward pass, the computation waits for the copy before the last; in
    the backward pass, those of the layer before arrive while a layer is recomputed. In host memory, they are slices of
    one block, which the next forward pass uses again.

    Args:
        scorer: the policy, with gradient checkpointing enabled.
        device: its device.

    Raises:
        OptionError: the layers of the model do not call a checkpoint function of their own.
    """

    def __init__(self, scorer: Scorer, device: torch.device) -> None:
        self._originals = {layer: checkpoint_function(layer) for layer in decoder_layers(scorer.model)}
        if not self._originals or None in self._originals.values():
            model = type(scorer.model).__name__
            raise OptionError(f"{_KEY}=True: the layers of {model} do not call a checkpoint function each; remove it")
        self._device = device
        self._copies = CudaCopies() if device.type == "cuda" else Copies()
        self._memory: Tensor | None = None
        self._tokens = self._taken = self._number = 0
        self._saved: dict[int, Tensor] = {}  # in host memory, by the number of hidden states in the run
        self._moving: deque[_Moving] = deque()
        for layer, original in self._originals.items():
            set_checkpoint_function(layer, self._around(original))
        # Functions without an owner: a copy of the model must not copy the host memory.
        self._hook = scorer.register_forward_pre_hook(lambda _, given: self._begin(given[0]["input_ids"].numel()))

    def close(self) -> None:
        """Release the host memory; the layers keep their hidden states on the device again."""
        self._settle()
        self._release()
        self._hook.remove()
        for layer, original in self._originals.items():
            set_checkpoint_function(layer, original)

    def _begin(self, tokens: int) -> None:
        """Begin a forward pass; what an earlier one has saved is discarded, also if its backward pass has failed."""
        if torch.is_grad_enabled():
            self._settle()
            self._saved.clear()
            self._tokens, self._taken = tokens, 0

    def _around(self, original: Any) -> Callable[..., Any]:
        """Return the checkpoint function of a layer with hooks around it."""

        def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(function, *args, **kwargs)
            if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
                raise OptionError(f"{_KEY}=True: a layer's hidden states are not its first argument; remove it")
            hidden, packed = _content(args[0]), list[int]()

            def pack(tensor: Tensor) -> Any:
                if _content(tensor) != hidden:
                    return tensor
                if not packed:  # a layer may receive them twice
                    packed.append(self._save(tensor))
                return packed[0]

            with saved_tensors_hooks(pack, self._restore):
                return original(function, *args, **kwargs)

        return checkpoint

    def _save(self, tensor: Tensor) -> int:
        """Start the copy of hidden states to the host; return their number."""
        self._settle(PENDING - 1)
        tensor = tensor.contiguous()
        self._number += 1
        host = self._saved[self._number] = self._slice(tensor)
        self._moving.append(_Moving(self._number, tensor, self._copies.start(host, tensor)))
        return self._number

    def _restore(self, saved: Any) -> Any:
        """Return hidden states on the device, and start the copy of those of the layer before."""
        if not isinstance(saved, int):
            return saved
        if saved not in self._saved:
            raise RuntimeError("the hidden states of this pass were replaced by those of a later forward pass")
        if not self._moving or self._moving[0].number != saved:
            self._settle()
            self._fetch(saved)
        if saved - 1 in self._saved:
            self._fetch(saved - 1)
        self._copies.wait(self._moving[0].copy)
        return self._moving.popleft().tensor

    def _fetch(self, number: int) -> None:
        """Start the copy of hidden states to the device."""
        host = self._saved[number]
        tensor = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        self._moving.append(_Moving(number, tensor, self._copies.start(tensor, host)))

    def _settle(self, most: int = 0) -> None:
        """Wait for copies until at most ``most`` are pending, so that what the others read and write can be freed."""
        while len(self._moving) > most:
            self._copies.wait(self._moving[0].copy)
            self._moving.popleft()

    def _slice(self, like: Tensor) -> Tensor:
        """Return host memory with the shape and dtype of ``like``."""
        whole = len(self._originals) * self._tokens * (like.nbytes // math.prod(like.shape[-3:-1]))
        if self._memory is None or (self._taken == 0 and self._memory.numel() < whole):
            self._release()
            on_gpu = self._device.type == "cuda"  # only page-locked memory is copied asynchronously
            check_host_memory(page_locked(whole) if on_gpu else whole)
            self._memory = torch.empty(whole, dtype=torch.uint8, pin_memory=on_gpu)
        start, self._taken = self._taken, self._taken + like.nbytes
        if self._taken > self._memory.numel():
            raise OptionError(f"{_KEY}=True: a layer of this model is called more than once in a pass; remove it")
        return self._memory[start : self._taken].view(like.dtype).view(like.shape)

    def _release(self) -> None:
        """Release the host memory."""
        if self._memory is not None:
            self._copies.finish()
            self._memory = None


def _content(tensor: Tensor) -> tuple[object, ...]:
    """Return what identifies a tensor's content: autograd saves another object than the layer receives."""
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
