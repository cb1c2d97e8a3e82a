"""Optimizer, schedule and phases: the inputs of the engines and their measurements."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config

from alignment import CPOConfig
from alignment.config.errors import OptionError
from alignment.engines import optimizers, rng
from alignment.engines.optimizers import build_optimizer, build_scheduler, parameter_groups
from alignment.engines.phases import Phases, over_ranks

GPT2 = GPT2Config(vocab_size=20, n_embd=8, n_head=2, n_layer=1, n_positions=8)


def options(**more: Any) -> CPOConfig:
    return CPOConfig(output_dir="out", **more)


def test_biases_and_norms_do_not_decay() -> None:
    model = AutoModelForCausalLM.from_config(GPT2)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    model.transformer.wpe.requires_grad_(False)
    decayed, others = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    found = {names[id(parameter)] for parameter in decayed["params"]}
    linear = {f"transformer.h.0.{part}.weight" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert found == linear | {"transformer.wte.weight"}
    assert {names[id(p)] for p in others["params"]} == set(names.values()) - found - {"transformer.wpe.weight"}


@pytest.mark.parametrize(
    ("optim", "kind", "fused"),
    [("adamw_torch", torch.optim.AdamW, True), ("sgd", torch.optim.SGD, None)],
)
def test_the_optimizer_is_the_selected_one(optim: str, kind: type, fused: bool | None) -> None:
    adam = {} if optim == "sgd" else {"adam_beta2": 0.95, "adam_epsilon": 1e-3}
    made = build_optimizer(nn.Linear(2, 2), options(optim=optim, learning_rate=0.5, weight_decay=0.1, **adam))
    assert type(made) is kind and made.defaults["fused"] is fused and made.defaults["lr"] == 0.5
    assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.0]
    assert optim == "sgd" or (made.defaults["betas"], made.defaults["eps"]) == ((0.9, 0.95), 1e-3)


def test_optim_args() -> None:
    made = build_optimizer(nn.Linear(2, 2), options(optim="sgd", optim_args="momentum=0.5,nesterov=true"))
    assert made.defaults["momentum"] == 0.5 and made.defaults["nesterov"] is True
    made = build_optimizer(nn.Linear(2, 2), options(optim_args="betas=(0.8, 0.9),fused=false"))
    assert (made.defaults["betas"], made.defaults["eps"], made.defaults["fused"]) == ((0.8, 0.9), 1e-8, False)
    for wrong in ("moment=0.5", "weight_decay=0.1", "lr=0.1", "momentum=-1"):
        with pytest.raises(OptionError, match="^optim_args: "):
            build_optimizer(nn.Linear(2, 2), options(optim="sgd", optim_args=wrong))
    with pytest.raises(OptionError, match="^model: no parameter"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), options())


def test_a_schedule_with_wrong_arguments() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=8.0)
    given = options(lr_scheduler_type="cosine", lr_scheduler_kwargs={"no_such": 1})
    with pytest.raises(OptionError, match="^lr_scheduler_type 'cosine' with lr_scheduler_kwargs .*no_such"):
        build_scheduler(optimizer, given, steps=10)


def test_phases_add_up_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.0, 10.0, 10.5, 20.0, 27.0])
    monkeypatch.setattr("alignment.engines.phases.time.monotonic", lambda: next(clock))
    phases = Phases(torch.device("cpu"))
    with phases("train") as record:
        record.tokens += 100
    with pytest.raises(KeyError), phases("train") as record:
        record.tokens += 20
        raise KeyError
    with phases("step"):
        pass
    found = phases.summary()
    assert all(record.pop("peak_bytes") > 2**20 for record in found.values())
    assert found == {
        "train": {"seconds": 2.5, "tokens": 120, "entries": 2},
        "step": {"seconds": 7.0, "tokens": 0, "entries": 1},
    }


class FakeEvent:
    """An event of a GPU that has finished all work queued before ``done``; its clock is ``given``."""

    given, done, synchronized = 0.0, 0.0, 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.given

    def query(self) -> bool:
        return self.at <= FakeEvent.done

    def synchronize(self) -> None:
        FakeEvent.synchronized += 1
        FakeEvent.done = max(FakeEvent.done, self.at)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.query(), "torch raises where the end is still to come"
        return 1e3 * (end.at - self.at)


def test_phases_of_a_gpu_are_timed_without_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("waited for the GPU"))
    phases = Phases(torch.device("cuda", 0))
    for seconds in (2.0, 3.0):
        with phases("train") as record:
            FakeEvent.given += seconds
        assert record.seconds == 0 and FakeEvent.synchronized == 0, "the GPU is still at it"
    FakeEvent.done = 2.0
    with pytest.raises(KeyError), phases("step"):
        FakeEvent.given += 0.5
        raise KeyError
    assert record.seconds == 2.0 and FakeEvent.synchronized == 0
    assert phases.summary() == {
        "train": {"seconds": 5.0, "tokens": 0, "peak_bytes": 7, "entries": 2},
        "step": {"seconds": 0.5, "tokens": 0, "peak_bytes": 7, "entries": 1},
    }
    assert FakeEvent.synchronized == 1


def test_summaries_of_several_ranks() -> None:
    one = {"train": {"seconds": 2.0, "tokens": 5, "peak_bytes": 7, "entries": 1}}
    other = {
        "train": {"seconds": 1.0, "tokens": 6, "peak_bytes": 9, "entries": 1},
        "save": {"seconds": 3.0, "tokens": 0},
    }
    assert over_ranks([one, other]) == {
        "train": {"seconds": 2.0, "tokens": 11, "peak_bytes": 9, "entries": 1},
        "save": {"seconds": 3.0, "tokens": 0},
    }


def test_phases_of_another_number_of_ranks() -> None:
    states = []
    for seconds, tokens in ((2.0, 5), (1.0, 6)):
        states.append({"records": {"train": {"seconds": seconds, "tokens": tokens, "peak_bytes": 7, "entries": 1}}})
    made = Phases(torch.device("cpu"))
    for rank, tokens in ((0, 11), (1, 0), (2, 0)):
        made.load_state_dict(made.redistributed(states, rank))
        assert made.summary() == {"train": {"seconds": 2.0, "tokens": tokens, "peak_bytes": 7, "entries": 1}}


def test_the_generators_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: "all")
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", calls.append)
    rng.rewinder()()
    assert calls.pop() == "all"
    gpu, streams = torch.device("cuda", 1), rng.RandomStreams()
    assert streams.state_dict()["cuda"] is None
    monkeypatch.setattr(rng, "device", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda own: torch.tensor([own.index, 200], dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, own: calls.append((state.tolist(), own)))
    state = streams.state_dict()
    for saved, wanted in ((state, [([1, 200], gpu)]), (state | {"cuda": None}, [])):
        streams.load_state_dict(saved)
        assert calls == wanted
        calls.clear()


@pytest.mark.parametrize(("lacks", "said"), [("nvcc", "CUDA toolkit"), ("c++", "C[+][+]"), ("ninja", "ninja")])
def test_what_is_missing_to_compile_an_optimizer(lacks: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "c++")
    monkeypatch.setattr(optimizers, "has_cuda_compiler", lambda: lacks != "nvcc")
    monkeypatch.setattr(optimizers.shutil, "which", lambda name: None if name == lacks else name)
    monkeypatch.setattr(optimizers.cpp_extension, "is_ninja_available", lambda: lacks != "ninja")
    for builder, cuda in (("FusedAdamBuilder", True), ("FusedAdamBuilder", False), ("CPUAdamBuilder", True)):
        found = optimizers.missing_to_compile(builder, cuda=cuda)
        if lacks == "nvcc" and (builder, cuda) != ("FusedAdamBuilder", True):
            assert found is None
        else:
            assert found is not None and re.search(said, found)
    monkeypatch.setattr(optimizers, "is_prebuilt", lambda builder: builder == "CPUAdamBuilder")
    assert optimizers.missing_to_compile("CPUAdamBuilder", cuda=False) is None
