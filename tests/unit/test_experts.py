"""Experts in 4 bits: packing and unpacking, products and their gradients, and what is recognized and refused."""

from __future__ import annotations

import itertools
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
from support.helpers import tiny_config
from support.tiny_experts import ARCHITECTURES, experts_config
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PretrainedConfig

from alignment import KTOConfig
from alignment.config.errors import ModelError, OptionError
from alignment.models import experts
from alignment.models.adapters.plan import plan_adapters
from alignment.models.quantized import quantized
from alignment.models.source import ModelSource
from tools.architectures.tiny import tiny_config as tiny_type

SHAPE = torch.Size([5, 24, 40])  # 15 blocks per expert: nested blocks of 256 contain parts of two experts


def config(**more: Any) -> BitsAndBytesConfig:
    """Return a configuration with nested NF4 by default."""
    given = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, **more}
    return BitsAndBytesConfig(load_in_4bit=True, **given)


def weights(shape: torch.Size = SHAPE, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def limit(patch: pytest.MonkeyPatch, number: int, shape: torch.Size = SHAPE, size: int = 4) -> None:
    """Limit dequantized weights to those of a number of experts."""
    patch.setattr(experts, "EXPERT_BYTES", number * shape[1:].numel() * size)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    ("dtype", "storage"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.uint8)],
)
def test_packed_as_by_bitsandbytes(
    kind: str, nested: bool, dtype: torch.dtype, storage: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise, in any number of parts."""
    shape = torch.Size([70, 24, 40])  # more than 4 nested blocks
    whole = weights(shape, dtype)
    expected = bnb.nn.Params4bit(
        whole.clone(), False, compress_statistics=nested, quant_type=kind, quant_storage=storage
    ).to("cpu")
    values = bnb.functional.dequantize_4bit(expected.data, expected.quant_state)
    for number in (1, 3, 70):
        limit(monkeypatch, number, shape, dtype.itemsize)
        given = config(bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested, bnb_4bit_quant_storage=storage)
        packed = experts.pack(whole, given)
        assert torch.equal(packed.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert packed.dtype == storage and packed.shape == expected.shape and not packed.requires_grad
        own, other = (one.quant_state.as_dict(packed=True) for one in (packed, expected))
        assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)
        for first, last in ((0, 70), (0, 1), (16, 18), (17, 52), (69, 70)):
            assert torch.equal(experts.unpack(packed, first, last), values[first:last])
    size = experts.expert_bytes(whole.numel(), nested)
    state = packed.quant_state
    constants = [state.absmax, *([state.state2.absmax, state.state2.code, state.offset] if nested else [])]
    assert size == sum(one.nbytes for one in (packed.data, *constants))


def test_packed_experts_are_moved_and_copied_with_their_constants() -> None:
    packed = experts.pack(weights(), config())
    assert experts.is_packed_expert(packed) and not experts.is_packed_expert(weights())
    module = torch.nn.Module()
    module.register_parameter("stack", packed)
    moved: Any = module.to("cpu", torch.float32).stack
    assert torch.equal(experts.unpack(moved, 1, 3), experts.unpack(packed, 1, 3))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "counts", [(3, 4, 1, 2, 5), (0, 0, 7, 0, 2), (4, 0, 0, 0, 0), (0, 0, 0, 0, 0)], ids=lambda c: "-".join(map(str, c))
)
def test_products_and_gradients(counts: tuple[int, ...], transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with a loop over dequantized experts in float64."""
    packed = experts.pack(weights(), config())
    whole = experts.unpack(packed, 0, 5).double()
    inner, outer = (24, 40) if transposed else (40, 24)
    ends = [*itertools.accumulate(counts)]
    rows = torch.randn(ends[-1], inner, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(ends[-1], outer, generator=torch.Generator().manual_seed(2))
    exact = rows.double().requires_grad_()
    parts = exact.split(list(counts))
    expected = torch.cat([part @ (one if transposed else one.T) for part, one in zip(parts, whole)])
    (gradient,) = torch.autograd.grad((expected * weight).sum(), exact)
    for number in (1, 2, 5):
        limit(monkeypatch, number)
        own = rows.clone().requires_grad_()
        found = experts._product(own, packed, torch.tensor(ends, dtype=torch.int32), transposed)
        (found * weight).sum().backward()
        torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-5, atol=1e-5)
        assert own.grad is not None
        torch.testing.assert_close(own.grad.double(), gradient, rtol=1e-5, atol=1e-5)


def test_only_experts_with_rows_are_dequantized_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    unpack = experts.unpack

    def recorded(weight: Any, first: int, last: int) -> Tensor:
        seen.append((first, last))
        return unpack(weight, first, last)

    monkeypatch.setattr(experts, "unpack", recorded)
    limit(monkeypatch, 2)
    packed = experts.pack(weights(), config())
    rows = torch.ones(6, 40, requires_grad=True)
    output = experts._product(rows, packed, torch.tensor([1, 2, 4, 4, 6], dtype=torch.int32), False)
    assert seen == [(0, 2), (2, 3), (4, 5)]
    output.sum().backward()
    assert seen[3:] == seen[:3]


def source(given: PretrainedConfig, **kwargs: Any) -> ModelSource:
    return ModelSource("some/model", None, given, kwargs)


def planned(given: PretrainedConfig, stage: int = 2, kwargs: Any = None, **options: Any) -> ModelSource:
    """Return a model with its quantization."""
    args = KTOConfig("out", **{"load_in_4bit": True, "use_peft": True, **options})
    return quantized(
        source(given, **kwargs or {}),
        args,
        key="some/model",
        in_4bit=args.load_in_4bit,
        in_8bit=args.load_in_8bit,
        compute=torch.bfloat16,
        stage=stage,
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_quantized_and_what_it_takes(name: str) -> None:
    given = experts_config(name)
    plan = planned(given).quantization
    assert plan is not None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(given)
    stacks = {n: p for n, p in model.named_parameters() if p.ndim == 3 and ".experts." in n}
    assert stacks and {*plan.packed_experts} == stacks.keys()
    assert plan.expert_bytes == sum(experts.expert_bytes(p.numel(), True) for p in stacks.values())
    skipped = planned(given, stage=3, bnb_4bit_skip_experts=True).quantization
    assert skipped is not None and not skipped.packed_experts
    assert skipped.expert_bytes == 2 * sum(p.numel() for p in stacks.values())
    eight = planned(given, load_in_4bit=False, load_in_8bit=True).quantization
    assert eight is not None and eight.expert_bytes == skipped.expert_bytes and not eight.packed_experts
    for one, said in ((plan, "of which experts take"), (skipped, "except experts ("), (eight, "except experts (")):
        assert said in one.describe()
    assert plan.content() != skipped.content()


def test_other_models_have_no_experts() -> None:
    plan = planned(tiny_config("tied"), stage=3).quantization
    assert plan is not None and not plan.expert_bytes and "experts" not in plan.describe()
    assert planned(tiny_type("recurrent_gemma")).quantization == plan  # other weights with three dimensions


def test_experts_can_be_named_among_modules_to_skip() -> None:
    given = {"load_in_4bit": True, "llm_int8_skip_modules": ["experts"], "bnb_4bit_compute_dtype": "bfloat16"}
    plan = planned(
        experts_config("mixtral"), stage=2, kwargs={"quantization_config": given}, load_in_4bit=False
    ).quantization
    assert plan is not None and plan.expert_bytes and not plan.packed_experts


@pytest.mark.parametrize("name", ["llama4_text", "jetmoe", "dbrx", "longcat_flash", "inkling_text"])
def test_experts_that_are_not_recognized_are_refused(name: str) -> None:
    given = tiny_type(name)
    with pytest.raises(OptionError, match=r"^some/model: experts of \w+ \(\S*(experts|mlp)\.\S+\) .*bnb_4bit_skip"):
        planned(given)
    plan = planned(given, bnb_4bit_skip_experts=True).quantization
    assert plan is not None and plan.expert_bytes > 0


@pytest.mark.parametrize(
    ("said", "name", "more"),
    [
        (r"^some/model: ZeRO stage 3 cannot partition .* \(deepspeed: zero2\)", "mixtral", {"stage": 3}),
        ("^bnb_4bit_compute_dtype='float32': .* bfloat16", "mixtral", {"bnb_4bit_compute_dtype": "float32"}),
        (
            "^model_init_kwargs: experts_implementation='eager': ",
            "mixtral",
            {"kwargs": {"experts_implementation": "eager"}},
        ),
        (r"^some/model: \S+gate_up_proj has 480 elements per expert, .* of 64", "odd", {}),
    ],
)
def test_what_quantized_experts_do_not_support(said: str, name: str, more: dict[str, Any]) -> None:
    odd = {"hidden_size": 20, "intermediate_size": 12}
    given = experts_config("mixtral", **odd if name == "odd" else {})
    with pytest.raises(OptionError, match=said) as caught:
        planned(given, **more)
    assert "bnb_4bit_skip_experts: true" in str(caught.value) and "\n" not in str(caught.value)
    assert planned(given, **{**more, "bnb_4bit_skip_experts": True})


def test_mxfp4_is_refused() -> None:
    given = experts_config("gpt_oss")
    given.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    with pytest.raises(ModelError, match="^some/model: .*mxfp4.* in bfloat16, and set load_in_4bit: true"):
        planned(given)


def adapters(given: PretrainedConfig, peft_config: Any = None, **options: Any) -> Any:
    """Return the plan of adapters on a model in 4 bits."""
    model = planned(given, **options)
    args = KTOConfig("out", **{"load_in_4bit": True, "use_peft": True, **options})
    return plan_adapters(args, model, peft_config=peft_config, quantization=model.quantization)


@pytest.mark.parametrize("name", [*ARCHITECTURES, "hunyuan_v1_moe", "phimoe", "zaya"])
@pytest.mark.parametrize("targets", [None, "all-linear"])
def test_adapters_reach_neither_routers_nor_quantized_experts(name: str, targets: str | None) -> None:
    given = experts_config(name) if name in ARCHITECTURES else tiny_type(name)
    found = adapters(given, lora_target_modules=targets)
    assert found.layers and not found.config.target_parameters
    assert not any({"router", "gate", "experts"} & {*layer.split(".")} for layer in found.layers)
    assert any("bnb_4bit_skip_experts" in note for note in found.notes)
    left = any(note.startswith("down_proj, gate_proj, up_proj get no adapters") for note in found.notes)
    assert left == (name in ("glm4_moe_lite", "deepseek_v3", "hunyuan_v1_moe"))


@pytest.mark.parametrize(
    ("said", "name", "options"),
    [
        ("^lora_target_parameters: .*'experts.down_proj'.*: true", "mixtral", {"parameters": ["experts.down_proj"]}),
        ("^lora_target_modules: .*'down_proj'.*: true", "deepseek_v3", {"modules": ["q_a_proj", "down_proj"]}),
        ("^lora_target_parameters: the model has no 'down'", "mixtral", {"parameters": ["down"]}),
    ],
)
def test_adapters_on_quantized_experts_are_refused(said: str, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=said):
        adapters(experts_config(name), **{f"lora_target_{kind}": names for kind, names in options.items()})


def test_parameters_of_a_configuration_that_match_nothing_are_refused() -> None:
    """PEFT only warns if other targets match."""
    for skip in (False, True):
        given = peft.LoraConfig(target_modules=["q_proj"], target_parameters=["experts.w1"])
        with pytest.raises(OptionError, match="^peft_config: .*target_parameters.* 'experts.w1'"):
            adapters(experts_config("mixtral"), given, bnb_4bit_skip_experts=skip)


def test_adapters_on_experts_that_are_skipped() -> None:
    named = ["experts.down_proj"]
    found = adapters(
        experts_config("mixtral"), lora_target_parameters=named, bnb_4bit_skip_experts=True, lora_dropout=0.0
    )
    assert found.config.target_parameters == named
    assert sum("experts" in layer for layer in found.layers) == 2
