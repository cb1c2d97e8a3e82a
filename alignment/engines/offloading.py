"""Keep the hidden states that gradient checkpointing saves in host memory between the forward and the backward pass.

Checkpointing saves the inputs of each recomputed layer through the hooks of autograd that surround it, and everything
within the layer through hooks of its own (non-reentrant) or not at all (reentrant). Hooks around the call of a layer
therefore see its inputs only. The first of them, its hidden states, moves; the others, such as position embeddings,
are the same tensors for all layers.

Not used: DeepSpeed's ``offload_activations``, which supports non-reentrant checkpointing only and keeps page-locked
buffers for each exact shape, so that sequences of varying lengths multiply host memory; TRL's and torchtune's
``OffloadActivations``, which moves every tensor that autograd saves, each into page-locked memory that torch's
allocator rounds up to a power of two; and torch's ``save_on_cpu``, which does too, and waits for each copy.
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
from alignment.internals.torch import lock_pages, storage_key, unlock_pages
from alignment.internals.transformers import checkpoints_itself, wrap_checkpoint
from alignment.models.partitioning import decoder_layers
from alignment.models.scorer import Scorer

_LEAVING = 2  # copies to the host that may be pending in the forward pass, each with its hidden states on the device
_KEY = "activation_offloading"


def check_host_memory(size: int, ranks: int = 1) -> None:
    """Raise :class:`OptionError` if each of ``ranks`` ranks of this host cannot have ``size`` bytes of its memory."""
    available = psutil.virtual_memory().available
    if size * ranks > available:
        raise OptionError(
            f"{_KEY}=True: the hidden states of the largest micro-batch take {size * ranks / 1e9:.2f} GB of host "
            f"memory ({counted(ranks, 'rank')}), of which {available / 1e9:.2f} GB are available; set "
            "per_device_train_batch_size, max_tokens_per_batch or max_length to a smaller number"
        )


class Copies:
    """Copies between a device and host memory, executed in order.

    Those of this class are for a device that is the host: they have finished when they return.
    """

    def allocate(self, size: int) -> Tensor:
        """Return ``size`` bytes of host memory."""
        return torch.empty(size, dtype=torch.uint8)

    def free(self, memory: Tensor) -> None:
        """Prepare for the end of host memory, from and to which there may still be copies."""

    def start(self, target: Tensor, source: Tensor) -> Any:
        """Copy once the device has computed ``source`` and no longer uses ``target``; return a handle of the copy.

        Until :meth:`wait` is called with it, neither may be freed or written to, and ``target`` not be read.
        """
        target.copy_(source)

    def wait(self, copy: Any) -> None:
        """Let the device's computation continue only after the copy."""


class CudaCopies(Copies):
    """Copies of a GPU, on a stream of their own, beside its computation."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def allocate(self, size: int) -> Tensor:
        # Copies from and to pageable memory are not asynchronous. torch's allocator of page-locked memory rounds sizes
        # up to a power of two (ATen/core/CachingHostAllocator.h): 18.4 GB would take 34.4. It can be configured not to
        # since torch 2.13 only.
        memory = torch.empty(size, dtype=torch.uint8)
        try:
            lock_pages(memory)
        except RuntimeError as error:
            raise OptionError(
                f"{_KEY}=True: {size / 1e9:.2f} GB of host memory cannot be page-locked ({error}); set max_length or "
                "max_tokens_per_batch to a smaller number, or remove it"
            ) from error
        return memory

    def free(self, memory: Tensor) -> None:
        self._stream.synchronize()
        unlock_pages(memory)

    def start(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, copy: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(copy)


class _Arena:
    """Host memory that is cut into slices, which are all taken again in the next forward pass."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._memory: Tensor | None = None
        self._taken = 0

    def restart(self, size: int) -> None:
        """Free all slices, and provide ``size`` bytes for new ones."""
        self._taken = 0
        if self._memory is not None and self._memory.numel() < size:
            self.close()
        if self._memory is None:
            check_host_memory(size)
            self._memory = self._copies.allocate(size)

    def take(self, like: Tensor) -> Tensor:
        """Return a slice with the shape and dtype of ``like``."""
        start, self._taken = self._taken, self._taken + like.nbytes
        if self._memory is None or self._taken > self._memory.numel():
            raise OptionError(f"{_KEY}=True: a layer of this model is called more than once in a pass; remove it")
        return self._memory[start : self._taken].view(like.dtype).view(like.shape)

    def close(self) -> None:
        """Release the memory."""
        if self._memory is not None:
            self._copies.free(self._memory)
            self._memory = None


class _Saved(NamedTuple):
    """Hidden states in host memory, with the number of the forward pass and their number within it."""

    forward: int
    number: int
    host: Tensor


class _Moving(NamedTuple):
    """Hidden states on the device, and the copy that reads or writes them."""

    saved: _Saved
    tensor: Tensor
    copy: Any


def _content(tensor: Tensor) -> tuple[object, ...]:
    """Return what identifies a tensor's content: autograd saves another object than the layer receives."""
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


class ActivationOffloading:
    """Moves the hidden states that a policy's recomputed layers save to host memory, and back one layer ahead.

    At most two of them are on the device at a time: in the forward pass, the computation waits for the copy before the
    last; in the backward pass, the hidden states of the layer before arrive while a layer is recomputed.

    Args:
        scorer: the policy, with gradient checkpointing enabled.
        device: its device.

    Raises:
        OptionError: the layers of the model cannot be found, or do not call a checkpoint function of their own.
    """

    def __init__(self, scorer: Scorer, device: torch.device) -> None:
        layers = decoder_layers(scorer.model)
        if not layers or not all(map(checkpoints_itself, layers)):
            raise OptionError(
                f"{_KEY}=True: the decoder layers of {type(scorer.model).__name__} do not call a checkpoint function "
                "each; remove it"
            )
        self._device = device
        self._copies = CudaCopies() if device.type == "cuda" else Copies()
        self._arena = _Arena(self._copies)
        self._layers, self._tokens, self._forward = len(layers), 0, 0
        self._saved: list[_Saved] = []
        self._leaving: deque[_Moving] = deque()
        self._arriving: _Moving | None = None
        self._undo = [wrap_checkpoint(layer, self._around) for layer in layers]
        # Functions without an owner: a copy of the model must not copy the host memory.
        self._hook = scorer.register_forward_pre_hook(lambda _, given: self._begin(given[0]["input_ids"].numel()))

    def close(self) -> None:
        """Release the host memory; the layers keep their hidden states on the device again."""
        self._settle()
        self._saved.clear()
        self._arena.close()
        self._hook.remove()
        for undo in self._undo:
            undo()

    def _begin(self, tokens: int) -> None:
        """Begin a forward pass; what an earlier one has saved is discarded, also if its backward pass has failed."""
        if torch.is_grad_enabled():
            self._settle()
            self._saved.clear()
            self._tokens, self._forward = tokens, self._forward + 1

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the checkpoint function of a layer with hooks around it."""

        def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(function, *args, **kwargs)
            if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
                raise OptionError(
                    f"{_KEY}=True: the hidden states of this model are no positional argument; remove it"
                )
            hidden, packed = _content(args[0]), list[_Saved]()

            def pack(tensor: Tensor) -> Any:
                if _content(tensor) != hidden:
                    return tensor
                if not packed:  # a layer may receive them twice
                    packed.append(self._save(tensor))
                return packed[0]

            with saved_tensors_hooks(pack, self._restore):
                return original(function, *args, **kwargs)

        return checkpoint

    def _save(self, tensor: Tensor) -> _Saved:
        """Start the copy of hidden states to the host."""
        if not self._saved:
            of_token = tensor.nbytes // math.prod(tensor.shape[-3:-1])
            self._arena.restart(self._layers * self._tokens * of_token)
        if len(self._leaving) == _LEAVING:
            self._copies.wait(self._leaving[0].copy)
            self._leaving.popleft()
        tensor = tensor.contiguous()
        saved = _Saved(self._forward, len(self._saved), self._arena.take(tensor))
        self._saved.append(saved)
        self._leaving.append(_Moving(saved, tensor, self._copies.start(saved.host, tensor)))
        return saved

    def _restore(self, saved: Any) -> Any:
        """Return hidden states on the device, and start the copy of those of the layer before."""
        if not isinstance(saved, _Saved):
            return saved
        if saved.forward != self._forward:
            raise RuntimeError(
                "the hidden states of this backward pass were replaced by those of a later forward pass"
            )
        arriving, self._arriving = self._arriving, None
        if arriving is None or arriving.saved is not saved:
            self._settle(arriving)
            arriving = self._fetch(saved)
        if saved.number > 0:
            self._arriving = self._fetch(self._saved[saved.number - 1])
        self._copies.wait(arriving.copy)
        return arriving.tensor

    def _fetch(self, saved: _Saved) -> _Moving:
        """Start the copy of hidden states to the device."""
        tensor = torch.empty(saved.host.shape, dtype=saved.host.dtype, device=self._device)
        return _Moving(saved, tensor, self._copies.start(tensor, saved.host))

    def _settle(self, *further: _Moving | None) -> None:
        """Wait for all copies, so that what they read and write can be freed."""
        for moving in (*self._leaving, self._arriving, *further):
            if moving is not None:
                self._copies.wait(moving.copy)
        self._leaving.clear()
        self._arriving = None
