"""Free memory of a device, the memory that an optimizer will still allocate, and torch's allocator."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import bitsandbytes
import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from support.drivers import rollout as rollout_driver
from support.drivers.rollout import PROMPTS, SEQUENCES, sampling
from support.helpers import STAGES, zero
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from alignment import CPOConfig
from alignment.config.errors import OptionError
from alignment.data.batching import collate
from alignment.engines import memory as device_memory
from alignment.engines import optimizers, scoring
from alignment.engines.launch_env import init_distributed
from alignment.engines.optimizers import KINDS, bytes_to_come, check_counts, parameter_groups
from alignment.engines.scoring import FrozenEngine, PolicyEngine
from alignment.internals.deepspeed import set_timeout_of_new_groups
from alignment.internals.deepspeed_state import Unit, inner_optimizer
from alignment.models.loading import load_model
from alignment.models.scorer import CompletionScorer
from alignment.rollout import memory
from alignment.rollout.backend import RolloutRequest
from alignment.rollout.engine import RolloutEngine

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GIB = 2**30
Made = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Made] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, fused=True),
    "8-bit": lambda weights: bitsandbytes.optim.AdamW8bit(weights),
    "paged": lambda weights: bitsandbytes.optim.PagedAdamW32bit(weights),
    "adagrad": lambda weights: torch.optim.Adagrad(weights),  # creates its states on construction
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1),
}


def policy_engine(model: str, stage: str, made: str, bf16: bool | None) -> PolicyEngine:
    """In fp32, or in bf16 with the engine's own accumulation; None: with that of fp32."""
    more: dict[str, Any] = {"bf16": {"enabled": bf16 is not False}}
    if bf16 is None:
        more["data_types"] = {"grad_accum_dtype": "fp32"}
    dtype = torch.float32 if bf16 is False else torch.bfloat16
    return rollout_driver.policy_engine(model, stage, made=OPTIMIZERS[made], dtype=dtype, further=more)


def live_tensors() -> list[torch.Tensor]:
    """All tensors on the CPU, including gradients."""
    gc.collect()
    found = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    found += [one.grad for one in found if one.is_leaf and one.grad is not None]
    return [tensor for tensor in found if tensor.device.type == "cpu"]


def live_bytes() -> int:
    """Their memory, counting each storage once."""
    storages = (tensor.untyped_storage() for tensor in live_tensors())
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def step(policy: PolicyEngine) -> None:
    batch = collate(SEQUENCES[0], 20)
    policy.backward(-policy.forward(batch).scores.mean(), last=True)
    policy.step()


CASES = [
    ("stage0", "adamw", False),
    ("stage2", "8-bit", True),
    ("stage2", "sgd", True),
    ("stage3", "adamw", None),  # fp32 accumulation
    ("stage2-offload", "adamw", True),
    *(("stage0", made, False) for made in ("paged", "adagrad", "momentum")),
    *((stage, "adamw", True) for stage in ("stage3", "stage3-offload")),
]


@pytest.mark.parametrize(("stage", "made", "bf16"), CASES)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_permanent_memory_of_the_first_step_is_known_in_advance(
    base: str, stage: str, made: str, bf16: bool | None
) -> None:
    held = live_tensors()  # leftovers of earlier tests would otherwise be freed during the measurement
    policy = policy_engine(base, stage, made, bf16)
    for _ in range(2):  # its first pass leaves small objects of DeepSpeed
        with policy.inference():
            policy.forward(collate(SEQUENCES[0], 20))
    inner = inner_optimizer(policy.engine)
    before, states = live_bytes(), len(inner.state)
    expected = bytes_to_come(policy.engine, CPU)
    assert (expected == 0) == (made in ("sgd", "adagrad"))
    assert len(inner.state) == states, "asking changes nothing"
    # An optimizer in host memory uses no GPU memory.
    assert bytes_to_come(policy.engine, GPU) == 0
    step(policy)
    assert live_bytes() - before == pytest.approx(expected, abs=3000), "a few scalars and a bucket"
    assert bytes_to_come(policy.engine, CPU) == 0
    policy.close()
    held.clear()


def test_the_memory_for_the_first_rollout_is_that_of_the_second_one(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_engine(base, "stage2", "adamw", False)
    with policy.inference():
        policy.forward(collate(SEQUENCES[0], 20))
    each = memory.completion_bytes(policy.scorer.model.config, policy.scorer.model.dtype.itemsize, 64)
    to_come = bytes_to_come(policy.engine, CPU)
    whole = live_bytes() + to_come + int(3.5 * each / 0.8)
    assert 3.5 * each + 0.8 * to_come > 4 * each, "what is to come makes a difference"
    monkeypatch.setattr(memory, "free_bytes", lambda where: whole - live_bytes())

    def room() -> memory.Room | None:
        made = RolloutEngine(policy, "generate", longest_context=64)
        made.generate(RolloutRequest(PROMPTS[:1], 1, sampling(), 3))
        return made.room

    first = room()
    step(policy)
    assert first == room() == memory.Room(True, 2)
    policy.close()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A GPU of 24 GiB, as torch describes it."""

    def described(free: int, allocated: int, reserved: int, share: float) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda where: (free * GIB, 24 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda where: allocated * GIB)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda where: reserved * GIB)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda where: share)

    return described


@pytest.mark.parametrize(
    ("free", "allocated", "reserved", "share", "expected"),
    [
        (20, 2, 3, 1.0, 21),  # reserved but unused memory is free
        (20, 2, 3, 0.5, 10),  # a cap of 12 GiB, of which 2 are taken
        (4, 2, 3, 0.5, 5),  # other processes leave less than the cap
        (20, 12, 12, 0.25, 0),
    ],
)
def test_free_memory_of_a_gpu_within_the_limit(
    gpu: Any, free: int, allocated: int, reserved: int, share: float, expected: int
) -> None:
    gpu(free, allocated, reserved, share)
    assert device_memory.free_bytes(GPU) == expected * GIB
    assert device_memory.total_bytes(GPU) == 24 * GIB * share


@pytest.fixture
def cuda_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in device_memory.VARIABLES:
        monkeypatch.setenv(name, "")  # so that any setting is undone
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(platform, "release", lambda: "6.1.0-amd64")
    monkeypatch.setattr("sys.platform", "linux")


def settings() -> dict[str, str]:
    return {name: device_memory.os.environ[name] for name in device_memory.VARIABLES if device_memory.os.environ[name]}


@pytest.mark.usefixtures("cuda_on_linux")
@pytest.mark.parametrize(
    ("release", "variable", "value"),
    [
        ("2.13.0+cu130", "PYTORCH_ALLOC_CONF", "expandable_segments:True,pinned_max_cached_size_mb:8"),
        ("2.12.1", "PYTORCH_ALLOC_CONF", "expandable_segments:True"),  # rejects the second key
        ("2.8.0", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),  # lacks the new name of the variable
    ],
)
def test_segments_are_expandable_by_default(
    monkeypatch: pytest.MonkeyPatch, release: str, variable: str, value: str
) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(release))
    assert device_memory.grow_segments() and settings() == {variable: value}
    assert not device_memory.grow_segments()


@pytest.mark.usefixtures("cuda_on_linux")
def test_segments_of_a_process_that_has_used_cuda_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has read the environment by then. A user's own settings are kept."""
    found = [""]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: found[-1])
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append)
    assert device_memory.grow_segments() and not settings()
    assert found == ["", "expandable_segments:True,pinned_max_cached_size_mb:8"]
    assert not device_memory.grow_segments() and len(found) == 2


@pytest.mark.usefixtures("cuda_on_linux")
@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (device_memory.os.environ, device_memory.VARIABLES[1], "max_split_size_mb:128"),
        (device_memory.os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),
        (torch.version, "cuda", None),
        (platform, "release", lambda: "5.15.90.1-microsoft-standard-WSL2"),
    ],
    ids=["own", "no cache", "no CUDA", "WSL"],
)
def test_segments_that_are_not_changed(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, value: Any) -> None:
    set_one = monkeypatch.setitem if where is device_memory.os.environ else monkeypatch.setattr
    set_one(where, name, value)
    before = settings()
    assert not device_memory.grow_segments() and settings() == before


class Pinned:
    """Page-locked copies, as the accelerator of a GPU makes them, and how many bytes of them exist."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.storages: list[tuple[Any, int]] = []
        self.requested = 0
        self.at_release: list[int] = []
        monkeypatch.setattr(type(get_accelerator()), "pin_memory", lambda _, tensor, **how: self.copy(tensor))
        monkeypatch.setattr(scoring, "release_pinned_memory", lambda: self.at_release.append(self.held))

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.clone()
        self.requested += made.nbytes
        self.storages.append((StorageWeakRef(made.untyped_storage()), made.nbytes))
        return made

    @property
    def held(self) -> int:
        return sum(nbytes for storage, nbytes in self.storages if not storage.expired())


def test_pinned_memory_that_deepspeed_drops_is_released(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every offloaded shard is pinned, then copied into one pinned buffer: what is dropped would stay locked."""
    init_distributed(use_cpu=True)
    pinned = Pinned(monkeypatch)
    config = {"train_micro_batch_size_per_gpu": 1, **zero(3, optimizer=True, parameters=True)}
    for part in ("offload_optimizer", "offload_param"):
        config["zero_optimization"][part]["pin_memory"] = True
    monkeypatch.setitem(STAGES, "pinned", config)
    policy = policy_engine(base, "pinned", "adamw", True)
    weights = sum(parameter.ds_numel for parameter in policy.scorer.parameters())
    assert pinned.requested == pytest.approx((2 + 2 + 2 + 4) * weights, rel=0.01), "shards are pinned twice"
    assert pinned.at_release == [pytest.approx((2 + 2 + 4) * weights, rel=0.01)]
    policy.close()
    del config["zero_optimization"]["offload_optimizer"], policy
    FrozenEngine(CompletionScorer(load_model(base, torch.float32, ds_config=config)), config).close()
    assert len(pinned.at_release) == 2


def test_the_groups_of_an_engine_wait_as_long_as_the_default_one() -> None:
    init_distributed(use_cpu=True)

    def limit(group: Any) -> timedelta:
        return group._get_backend(CPU).options._timeout

    assert limit(torch.distributed.group.WORLD) == limit(deepspeed.comm.new_group([0])) == timedelta(hours=6)
    set_timeout_of_new_groups(timedelta(minutes=7))
    assert limit(deepspeed.comm.new_group([0])) == timedelta(minutes=7)
    set_timeout_of_new_groups(timedelta(hours=6))


def test_large_groups_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])
    weights = [layer.weight for layer in layers]
    assert [group["params"] for group in parameter_groups(layers, 0.1)] == [weights, [one.bias for one in layers]]
    monkeypatch.setattr(optimizers, "GROUP", 128)
    for optim in KINDS.keys() - {"deepspeed_cpu_adam", "deepspeed_fused_adam"}:
        for offloaded in (False, True):
            args = CPOConfig(output_dir="out", optim=optim, weight_decay=0.1)
            made = optimizers.build_optimizer(layers, args, offloaded=offloaded)
            sizes = [sum(one.numel() for one in group["params"]) for group in made.param_groups]
            whole = offloaded and KINDS[optim].home[0] != "bitsandbytes.optim"
            assert sizes == ([320, 40] if whole else [128, 128, 64, 40]), optim
            found = [id(one) for group in made.param_groups for one in group["params"] if one.ndim == 2]
            assert found == [*map(id, weights)]
    assert [len(group["params"]) for group in parameter_groups(layers, 0.1, 63)] == [*[1] * 5, 5]


@pytest.mark.parametrize("made", [*OPTIMIZERS])
def test_more_elements_than_an_optimizer_can_count(made: str) -> None:
    fitting, large = (Unit(torch.empty(size, device="meta"), 0, ()) for size in (2**31 - 1, 2**31))
    optimizer = OPTIMIZERS[made]([nn.Parameter(torch.ones(2))])
    check_counts(optimizer, [fitting])
    with pytest.raises(OptionError, match="^optim: .* 2147483648 ") if made in ("8-bit", "paged") else nullcontext():
        check_counts(optimizer, [fitting, large])
