"""Models and engines on a CUDA device that computes nothing, to trace code without running it.

``FakeTensorMode`` determines shape, dtype and device of every result, and rejects operations on several devices, as a
GPU does. There are no values: reading one fails, which on a GPU would synchronize.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from alignment.data.batching import Batch
from alignment.engines.scoring import PolicyEngine, ScoringEngine

CUDA = torch.device("cuda", 0)
_BLOCK = 32  # elements of a packed weight per scale


def compile_command(source: Path, target: Path, compiler: str) -> list[str]:
    """Return the command that builds ``fake_cuda.cpp``."""
    package = Path(torch.__file__).parent
    libraries = package / "lib"
    return [
        *(compiler, "-shared", "-fPIC", "-O0", "-std=c++20", f"-I{package / 'include'}", str(source)),
        *("-o", str(target), f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"),
    ]


class Packed(nn.Linear):
    """Represents a 4-bit layer, which cannot exist in fake mode: two values per byte, and a scale for each block."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.bias = layer.bias
        packed = torch.zeros(layer.weight.numel() // 4, 1, dtype=torch.bfloat16)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scales", torch.ones(layer.weight.numel() // _BLOCK))
        self.register_buffer("code", torch.linspace(-1, 1, 16))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.whole().to(hidden.dtype), self.bias)

    def whole(self) -> Tensor:
        """(out, in) unpacked weights, which need no gradient."""
        halves = self.weight.view(torch.uint8).view(-1)
        numbers = torch.stack([halves >> 4, halves & 15], dim=1).view(-1).long()
        values = self.code[numbers].view(-1, _BLOCK) * self.scales[:, None]
        return values.view(self.out_features, self.in_features)


def pack(model: nn.Module) -> None:
    """Replace the projections of every layer with packed ones."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name.endswith("_proj"):
                setattr(module, name, Packed(child))


def onto_cuda(module: nn.Module, mode: FakeTensorMode) -> None:
    """Replace every parameter and buffer of a module with a fake one before tracing. Tied parameters stay tied."""
    made: dict[Tensor, Tensor] = {}

    def moved(tensor: Tensor) -> Tensor:
        if tensor not in made:
            fake = mode.from_tensor(tensor.detach())
            with mode:
                fake = fake.to(CUDA)
                parameter = isinstance(tensor, nn.Parameter)
                made[tensor] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if parameter else fake
        return made[tensor]

    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = moved(tensor)


def faked(batch: Any, mode: FakeTensorMode) -> Any:
    """Return a batch in host memory whose tensors have no values."""
    if isinstance(batch, Tensor):
        return mode.from_tensor(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{field.name: faked(getattr(batch, field.name), mode) for field in fields(batch)})
    return batch


class _Engine(nn.Module):
    """Replaces a DeepSpeed engine."""

    def __init__(self, scorer: nn.Module) -> None:
        super().__init__()
        self.module = scorer

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


class TracedEngine(PolicyEngine):
    """The policy's engine without DeepSpeed: forward passes on the fake device, backward passes by autograd."""

    def __init__(self, scorer: Any) -> None:
        self.scorer, self.engine, self.device, self.partitioned = scorer, _Engine(scorer), CUDA, False

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()


@contextlib.contextmanager
def tracing(mode: FakeTensorMode) -> Iterator[None]:
    """Fake mode with a fixed number of tokens per batch and without communication between ranks."""
    with (
        mode,
        mock.patch.object(Batch, "tokens", property(lambda batch: 1)),
        mock.patch("alignment.engines.collectives.dist.all_reduce", lambda *_, **__: None),
    ):
        yield


def check_devices(engine: ScoringEngine) -> int:
    """Return the number of gradients of an engine, and check that they are on the devices of their parameters."""
    trained = [(name, p) for name, p in engine.scorer.named_parameters() if p.requires_grad]
    for name, parameter in trained:
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.device == parameter.device == CUDA, name
        assert parameter.grad.shape == parameter.shape, name
    assert trained and all(p.grad is None for p in engine.scorer.parameters() if not p.requires_grad)
    return len(trained)
