"""Assumptions of `alignment.internals.deepspeed` and `deepspeed_zero3`, with real engines around a small module.

Tests look at private parts through these functions first, and by themselves only where a fault has to be shown: what a
release renames is then reported by the function that needs it.
A test that fails after an upgrade of DeepSpeed says which of its inner parts has changed. Where a workaround is no
longer needed, the half of the test that shows the fault fails: then the function can go.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops import op_builder
from deepspeed.utils import set_z3_leaf_module
from pydantic import ValidationError
from support.helpers import zero
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from alignment.config.deepspeed_keys import set_at
from alignment.engines import launch_env
from alignment.engines import memory as device_memory
from alignment.engines.launch_env import init_distributed
from alignment.internals import deepspeed as internals
from alignment.internals import deepspeed_zero3 as zero3
from alignment.internals.torch import without_forward_hooks

WIDTH = 16


class Net(nn.Module):
    """Blocks of a partitioned weight and a small bias that DeepSpeed keeps gathered; the first may be a leaf."""

    leaf = False

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.recompute = recompute
        set_z3_leaf_module(self.blocks[0], self.leaf)

    def forward(self, states: Tensor) -> Tensor:
        for block in self.blocks:
            states = checkpoint(block, states, use_reentrant=False) if self.recompute else block(states)
        return states.square().sum()


def configuration(stage: int, **more: Any) -> dict[str, Any]:
    """At stage 3, one weight at a time is prefetched and none is kept for later use, as in a large model."""
    section = zero(stage)["zero_optimization"]
    if stage == 3:
        section |= {"stage3_prefetch_bucket_size": WIDTH**2, "stage3_max_reuse_distance": 0}
    return {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": section,
        **more,
    }


def build(
    stage: int, *, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, recompute: bool = False, **more: Any
) -> Any:
    """An engine around a module that contains a `Net`, the same at every stage; other arguments are for the JSON."""
    init_distributed(use_cpu=True)
    config = configuration(stage, **more)
    torch.manual_seed(0)
    module = nn.Sequential(Net(recompute))
    made, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer(module.parameters(), lr=0.01, weight_decay=0.5),
        config=config,
        dist_init_required=False,
    )
    return made


def batch(engine: Any) -> Tensor:
    dtype = next(engine.module.parameters()).dtype
    return torch.linspace(-1, 1, 2 * WIDTH, dtype=dtype).reshape(2, WIDTH).requires_grad_()


def step(engine: Any) -> None:
    engine.backward(engine(batch(engine)))
    engine.step()


def status(parameter: Any) -> str:
    """ZeRO-3's name of a parameter's state, such as ``INFLIGHT``."""
    return str(parameter.ds_status.name)


@pytest.fixture
def stack_as_before() -> Iterator[None]:
    """For tests that leave entries on the stack."""
    before = list(zero3._module_stack())
    yield
    zero3._module_stack()[:] = before
    zero3.forget_release_plans()


@pytest.mark.usefixtures("stack_as_before")
@pytest.mark.parametrize("chosen", [True, False])
def test_a_leaf_whose_input_needs_no_gradient_is_reduced_too_early(chosen: bool) -> None:
    with mock.patch.object(Net, "leaf", True), zero3.reduced_by_parameter(lambda module: chosen):
        engine = build(3)
    weight, found = engine.module[0].blocks[0][0].weight, []
    assert weight.ds_z3_leaf_module is engine.module[0].blocks[0]
    for _ in range(2):
        with deepspeed.zero.GatheredParameters(weight):
            found.append(weight.detach().clone())
        with contextlib.nullcontext() if chosen else pytest.raises(RuntimeError, match="must match the size"):
            engine.backward(engine(batch(engine).detach()))
            engine.step()
        if not chosen:
            break
    else:
        decayed = found[0] * (1 - 0.01 * 0.5)
        assert not torch.allclose(found[1], decayed, rtol=0, atol=1e-5)
    internals.destroy(engine)
    zero3.forget_partitioned(engine.module)


@pytest.mark.parametrize(
    ("section", "wrong"),
    [
        ("zero_optimization", {"stage": 7}),
        ("zero_optimization", {"stage": 2, "offload_optimizer": {"device": "moon"}}),
        ("zero_optimization.offload_param", {"device": "moon"}),
        ("zero_optimization.offload_optimizer", {"device": "moon"}),
        ("zero_optimization.leaf_module", {"klasses": []}),
        ("timers.throughput", {"enabled": "perhaps"}),
        ("bf16", {"enabled": "perhaps"}),
        ("fp16", {"loss_scale": "high"}),
    ],
)
def test_section_models_reject_what_an_engine_rejects(section: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as early:
        internals.section_models()[section](**wrong)
    config: dict[str, Any] = {}
    set_at(config, section, wrong)
    with pytest.raises(ValidationError) as late:
        build(0, **config)
    assert early.value.errors()[0]["loc"][-1] == late.value.errors()[0]["loc"][-1]


def test_a_prebuilt_op_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiles(self: Any, verbose: bool = True) -> None:
        raise RuntimeError("compiled")

    internals.is_prebuilt("CPUAdamBuilder")
    builder = op_builder.CPUAdamBuilder()
    installed_ops = importlib.import_module("deepspeed.git_version_info").installed_ops
    monkeypatch.setattr(type(builder), "jit_load", compiles)
    monkeypatch.setitem(installed_ops, builder.name, False)
    assert not internals.is_prebuilt("CPUAdamBuilder")
    with pytest.raises(RuntimeError, match="compiled"):
        builder.load()
    monkeypatch.setitem(installed_ops, builder.name, True)
    assert internals.is_prebuilt("CPUAdamBuilder")
    with pytest.raises(ImportError):  # looked up in DeepSpeed's own folder, where it is missing
        builder.load()


def test_the_shared_memory_op_is_not_built_without_its_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Any, verbose: bool = True) -> None:
        raise RuntimeError("compiled")

    init_distributed(use_cpu=True)
    backend = importlib.import_module("deepspeed.comm.torch")
    monkeypatch.setattr(type(op_builder.ShareMemCommBuilder()), "load", load)
    internals.skip_shared_memory_op()
    compatible = deepspeed.ops.__compatible_ops__
    monkeypatch.setitem(compatible, "deepspeed_shm_comm", True)
    with pytest.raises(RuntimeError, match="compiled"):
        backend.TorchBackend("gloo", None, None)
    internals.skip_shared_memory_op()
    assert backend.TorchBackend("gloo", None, None).shm_comm_op is None


@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (0, True), (1, True), (2, False), (3, False), (3, True)])
def test_the_norm_is_a_number_and_weights_are_partitioned_where_expected(stage: int, bf16: bool) -> None:
    more = {"data_types": {"grad_accum_dtype": "fp32"}} if stage == 1 else {}
    engine = build(stage, bf16={"enabled": bf16}, **more)
    reported = internals.reports_grad_norm(engine)
    assert reported == ((stage, bf16) != (0, False))
    assert internals.partitions_weights(engine) == (stage == 3)
    assert all(map(zero3.is_partitioned, engine.module.parameters())) == (stage == 3)
    step(engine)
    assert (engine.get_global_grad_norm() is not None) == reported
    internals.destroy(engine)
    zero3.forget_partitioned(engine.module)


@pytest.mark.parametrize("fp16", [False, True])
def test_a_scaled_loss_may_overflow(fp16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)
    engine = build(2, fp16={"enabled": fp16})
    engine.backward(engine(batch(engine)) * float("inf"))
    engine.step()
    assert internals.scales_loss(engine) == fp16
    for parameter in engine.module.parameters():
        assert (parameter.dtype == torch.float16) == fp16 and parameter.isfinite().all()
    internals.destroy(engine)


def test_a_destroyed_engine_removes_its_hooks() -> None:
    """Those of ZeRO-3, which gather weights; two of the engine's hooks on the outermost module stay."""
    engine = build(3)
    step(engine)
    inner = engine.module[0]

    def hooks() -> int:
        both = [(*part._forward_pre_hooks.values(), *part._forward_hooks.values()) for part in inner.modules()]
        return sum(zero3.is_deepspeed_hook(hook) for of_module in both for hook in of_module)

    assert hooks() > 0
    internals.destroy(engine)
    assert hooks() == 0
    zero3.forget_partitioned(engine.module)


@pytest.mark.parametrize("wrapper", ["unfused_optimizer.FP16_UnfusedOptimizer", "fused_optimizer.FP16_Optimizer"])
def test_the_first_step_equals_that_of_a_fresh_adam(wrapper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def after_one_step(undo: Callable[[Any], None]) -> tuple[Tensor, Tensor]:
        """All weights after one step, and after one step of torch's AdamW on fp32 copies."""
        engine = build(0, optimizer=torch.optim.AdamW, bf16={"enabled": True})
        undo(engine.optimizer)
        assert f"{type(engine.optimizer).__module__}.{type(engine.optimizer).__name__}".endswith(wrapper)
        parameters = list(engine.module.parameters())
        copies = [p.detach().float().requires_grad_() for p in parameters]
        fresh = torch.optim.AdamW(copies, lr=0.01, weight_decay=0.5)
        engine.backward(engine(batch(engine)))
        for twin, parameter in zip(copies, parameters):
            twin.grad = parameter.grad.float()
        engine.step()
        fresh.step()
        internals.destroy(engine)
        return tuple(torch.cat([p.detach().float().flatten() for p in ps]) for ps in (parameters, copies))

    if wrapper.startswith("fused"):  # instead of DeepSpeed's Adam, which would have to be compiled
        monkeypatch.setattr("deepspeed.runtime.engine.FusedAdam", torch.optim.AdamW)
    found, expected = after_one_step(internals.undo_dummy_step)
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=0)  # rounded to bf16
    found, expected = after_one_step(lambda optimizer: None)
    assert float((found - expected).abs().mean()) == pytest.approx(0.01 / 4, rel=0.5)


def test_an_optimizer_without_steps_is_not_changed() -> None:
    for stage in (0, 2, 3):
        engine = build(stage, optimizer=torch.optim.AdamW)
        step(engine)
        state = str(engine.optimizer.state_dict())
        internals.undo_dummy_step(engine.optimizer)
        assert str(engine.optimizer.state_dict()) == state
        internals.destroy(engine)
        zero3.forget_partitioned(engine.module)


@pytest.fixture
def engine() -> Iterator[Any]:
    """An engine at stage 3 after a first step: DeepSpeed has gathered the small weights."""
    made = build(3)
    step(made)
    zero3.divide_again(made.module)
    yield made
    internals.destroy(made)
    zero3.forget_partitioned(made.module)


def weights(engine: Any) -> list[Any]:
    """Collected before a forward, since accessing one in its module during a forward gathers it."""
    return [parameter for name, parameter in engine.module.named_parameters() if name.endswith("weight")]


def away(engine: Any) -> list[int]:
    """The indices of the partitioned weights, of which there are three."""
    gone = {id(parameter) for parameter in zero3.away(engine.module)}
    return [number for number, weight in enumerate(weights(engine)) if id(weight) in gone]


def test_a_partitioned_weight_is_found_with_its_size(engine: Any) -> None:
    plain, own = Net(), weights(engine)
    assert not any(map(zero3.is_partitioned, plain.parameters())) and zero3.away(plain) == []
    assert all(map(zero3.is_partitioned, engine.module.parameters()))
    assert away(engine) == [0, 1, 2]
    assert [zero3.whole_bytes(weight) for weight in own] == [4 * WIDTH**2] * 3
    assert own[0].numel() < WIDTH**2
    with deepspeed.zero.GatheredParameters(own[:2]):
        assert away(engine) == [2] and own[0].numel() == WIDTH**2
    assert away(engine) == [0, 1, 2]


def failing_forward(engine: Any, seen: Callable[[], Any]) -> Any:
    """The result of ``seen`` during the second block, whose forward then fails."""
    found: list[Any] = []

    def fails(*_: Any) -> None:
        found.append(seen())
        raise ValueError("in the middle of a forward")

    hook = engine.module[0].blocks[1][0].register_forward_hook(fails, prepend=True)
    with pytest.raises(ValueError):
        engine(batch(engine))
    hook.remove()
    return found[0]


def test_a_failing_pass_leaves_weights_gathered_or_in_flight(engine: Any) -> None:
    failing_forward(engine, lambda: None)
    zero3.settle(engine, engine.module)
    assert 1 not in away(engine)
    zero3.divide_again(engine.module)
    assert away(engine) == [0, 1, 2] and len(zero3.away(engine.module)) == 3, "biases are to stay whole"
    own = weights(engine)
    for _ in range(2):
        step(engine)
    zero3.settle(engine, engine.module)
    in_flight = failing_forward(engine, lambda: [w for w in own if status(w) == "INFLIGHT"])
    assert in_flight, "DeepSpeed fetches ahead, once it knows the order of the modules"
    with pytest.raises(AssertionError, match="in flight"):
        in_flight[0].partition()
    zero3.settle(engine, engine.module)
    zero3.divide_again(engine.module)
    assert away(engine) == [0, 1, 2]


@pytest.mark.parametrize("announced", [True, False])
def test_weights_are_prefetched_only_in_announced_passes(engine: Any, announced: bool) -> None:
    ahead: list[bool] = []
    second = weights(engine)[1]
    engine.module[0].blocks[0][1].register_forward_hook(lambda *_: ahead.append(status(second) != "NOT_AVAILABLE"))
    inner = engine.module[0]  # the outermost module has a hook of DeepSpeed's that announces passes as well
    around = zero3.announced_passes(engine, inner) if announced else contextlib.nullcontext()
    with around, torch.no_grad():
        for _ in range(4):
            inner(batch(engine))
    assert ahead == ([False, False, True, True] if announced else [False] * 4)
    zero3.settle(engine, engine.module)
    assert not inner._forward_pre_hooks or all(map(zero3.is_deepspeed_hook, inner._forward_pre_hooks.values()))


@pytest.mark.parametrize("forgotten", [True, False])
def test_an_order_that_is_not_forgotten_ends_with_the_first_weights(engine: Any, forgotten: bool) -> None:
    """Two passes are recorded as one, of which each later pass is the beginning."""
    inner = engine.module[0]
    with torch.no_grad():
        engine(batch(engine))
        inner(batch(engine))
        engine(batch(engine))
        if forgotten:
            zero3.forget_order(engine)
            zero3.forget_order(engine)  # does nothing
        for _ in range(3):
            engine(batch(engine))
    assert (status(weights(engine)[0]) == "NOT_AVAILABLE") == forgotten
    zero3.settle(engine, engine.module)


@pytest.mark.parametrize("aside", [True, False])
def test_deepspeeds_hooks_partition_gathered_weights(engine: Any, aside: bool) -> None:
    calls: list[str] = []
    engine.module[0].blocks[0].register_forward_hook(lambda *_: calls.append("own"))
    unwanted = zero3.is_deepspeed_hook if aside else lambda hook: False
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_forward_hooks(engine.module, unwanted))
        stack.enter_context(deepspeed.zero.GatheredParameters(weights(engine)))
        stack.enter_context(torch.no_grad())
        engine.module[0](batch(engine))
        assert away(engine) == ([] if aside else [0, 1, 2]) and calls == ["own"]
    step(engine)
    zero3.divide_again(engine.module)
    assert away(engine) == [0, 1, 2] and calls == ["own"] * 2, "all hooks are back"


@pytest.mark.usefixtures("stack_as_before")
def test_a_recomputation_leaves_modules_on_the_stack() -> None:
    engine = build(3, recompute=True)
    stack = zero3._module_stack()

    def grown(around: Any) -> int:
        depth = len(stack)
        loss = engine(batch(engine))
        assert len(stack) == depth
        with around:
            engine.backward(loss)
        engine.step()
        return len(stack) - depth

    assert grown(zero3.balanced_module_stack()) == 0
    with zero3.balanced_module_stack():
        assert grown(contextlib.nullcontext()) > 0
    assert grown(zero3.balanced_module_stack()) == 0
    internals.destroy(engine)
    zero3.forget_partitioned(engine.module)
    depth = len(stack)
    with pytest.raises(ValueError), zero3.balanced_module_stack():
        stack.append(nn.Identity())
        raise ValueError
    assert len(stack) == depth


def stack_alone(module: nn.Module) -> None:
    """The part of `forget_partitioned` that concerns the stack."""
    own = set(module.modules())
    zero3._module_stack()[:] = [entry for entry in zero3._module_stack() if entry not in own]


@pytest.mark.parametrize(
    ("forget", "alive"),
    [
        (lambda module: None, True),
        (stack_alone, True),
        (lambda module: zero3.forget_release_plans(), True),
        (zero3.forget_partitioned, False),
    ],
    ids=["nothing", "the stack", "release plans", "both"],
)
@pytest.mark.usefixtures("stack_as_before")
def test_an_engine_is_freed_once_both_references_are_removed(forget: Callable[[nn.Module], None], alive: bool) -> None:
    other = build(3)
    engine = build(3)
    for _ in range(3):
        step(engine)
    internals.destroy(engine)
    forget(engine.module)
    watched = [weakref.ref(thing) for thing in (engine.module, engine.optimizer)]
    del engine
    gc.collect()
    assert any(watch() is not None for watch in watched) == alive
    assert other.module in zero3._module_stack(), "another engine's entry has to stay"
    internals.destroy(other)
    zero3.forget_partitioned(other.module)


@pytest.mark.parametrize(
    "visible", ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-7f4a5c8b-1b2d-5e3f-9a6c-0d1e2f3a4b5c"]
)
def test_free_memory_of_gpus_that_are_visible_by_name(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pynvml, which NVIDIA's containers have installed, DeepSpeed expects numbers."""
    cuda = importlib.import_module("deepspeed.accelerator.cuda_accelerator")
    monkeypatch.setattr(cuda, "pynvml", mock.Mock())
    monkeypatch.setattr(cuda.CUDA_Accelerator, "available_memory", cuda.CUDA_Accelerator.available_memory)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: 5 if device == torch.device("cuda", 3) else 0)
    monkeypatch.setattr(launch_env, "_accelerator", lambda use_cpu: "cuda")
    monkeypatch.setattr(launch_env, "_set_cuda_device", lambda: None)
    monkeypatch.setattr(launch_env, "join", lambda backend: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError):
        cuda.CUDA_Accelerator().available_memory()
    internals.measure_free_memory(lambda device: 10 * (device.index or 0))
    assert cuda.CUDA_Accelerator().available_memory() == 30 and cuda.CUDA_Accelerator().available_memory(1) == 10
    init_distributed(use_cpu=False)
    assert cuda.CUDA_Accelerator().available_memory() == cuda.CUDA_Accelerator().available_memory(3) == 5
