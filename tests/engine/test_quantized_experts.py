"""Mixtures of experts whose experts are quantized to 4 bits: log-probs, gradients, memory, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from conftest import selected_cases
from safetensors.torch import load_file, save_file
from support.adapter_grid import Combination, name_of
from support.adapter_results import CLOSE, Oracle, check, outcomes
from support.allocations import Allocations, library
from support.helpers import STAGES, options, paired_rows
from support.oracle.adapters import dense_base
from support.oracle.wide import wide_maths
from support.split_results import Results
from support.tiny_experts import ARCHITECTURES, make_experts
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from alignment import DPOConfig, DPOTrainer, KTOConfig
from alignment.config.errors import ModelError, OptionError
from alignment.models import experts
from alignment.models.quantization import Quantization
from alignment.models.quantized import quantized
from alignment.models.source import model_source
from alignment.rollout.backend import Sampling
from alignment.rollout.continuous import ContinuousBackend
from tools.ranks import RankServer

_TRAINED = "test_every_step_matches_peft_on_dequantized_experts"
_WAYS = (("stage0", 1, "unchecked"), ("stage2", 2, "checkpointed"), ("stage2", 1, "reentrant"))


def case(architecture: str, method: str, stage: str, ranks: int, checkpointing: str) -> Combination:
    """Return a case as in ``adapter_grid.py``."""
    return {
        **{"method": method, "kind": "qlora", "stage": stage, "ranks": ranks, "start": "new"},
        **{"checkpointing": checkpointing, "architecture": architecture},
    }


_CLAMPED = ("glm4_moe_lite", "gemma4_text", "deepseek_v3")  # KTO's KL would be 0 in the last step
CASES = [
    *(
        case(name, "CPO" if name in _CLAMPED else "KTO", *_WAYS[number % 3])
        for number, name in enumerate(ARCHITECTURES)
    ),
    *(case("qwen3_moe", "CPO", *way) for way in _WAYS),
    case("gpt_oss", "KTO", "stage0", 2, "reentrant"),
    case("mixtral", "OnlineDPO", "stage2", 2, "unchecked"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The models by architecture."""
    folder = tmp_path_factory.mktemp("models")
    return {name: make_experts(folder / name, name) for name in ARCHITECTURES}


def loaded(path: str, dtype: torch.dtype = torch.float32, **more: Any) -> PreTrainedModel:
    """Load a model in 4 bits as a run does."""
    args = KTOConfig("out", load_in_4bit=True, use_peft=True, **more)
    source = model_source(path, "model_name_or_path", args)
    source = quantized(source, args, key=path, in_4bit=True, compute=dtype, stage=0)
    return source.load(args, dtype, {}, torch.device("cpu")).eval()


def logps(model: torch.nn.Module) -> Tensor:
    """Return (2, 24, V) log-probs."""
    ids = torch.arange(48).view(2, 24) * 7 % 66
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.double().log_softmax(-1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_are_those_of_dequantized_weights(
    name: str, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with the same model in float64, in groups of three experts and of one."""
    expected = logps(dense_base(models[name], classifies=False, bits=4))
    model = loaded(models[name])
    packed = experts.packed_experts(model)
    assert packed and not experts.plain_experts(model)
    for size in (experts.EXPERT_BYTES, 3 * 4 * 64 * 128, 1):
        monkeypatch.setattr(experts, "EXPERT_BYTES", size)
        assert float((logps(model) - expected).abs().max()) < 1e-5


def test_generation(models: dict[str, str]) -> None:
    """With a cache, and one token at a time, greedily."""
    prompts = torch.arange(12).view(2, 6) * 5 % 66
    dense, model = dense_base(models["qwen3_moe"], classifies=False, bits=4), loaded(models["qwen3_moe"])
    found = model.generate(prompts, max_new_tokens=5, do_sample=False, eos_token_id=None)
    ids = prompts
    for _ in range(5):
        with wide_maths():
            ids = torch.cat([ids, dense(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, ids)


def test_continuous_batching_is_not_used(models: dict[str, str]) -> None:
    sampling = Sampling(max_new_tokens=4, eos_token_ids=(1,), pad_token_id=1)
    for more, expected in (({}, "quantized experts"), ({"bnb_4bit_skip_experts": True}, None)):
        found = ContinuousBackend().obstacle(loaded(models["qwen3_moe"], **more), sampling)
        assert found is None if expected is None else expected in str(found)


def test_memory_while_loading_and_in_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, with 64 experts in each of 3 layers, and compared with unquantized experts and with late quantization.

    While the model is loaded, two copies of one layer's experts exist at most. After the forward pass, nothing is kept
    that is not without quantization; in both passes, the limit is kept.
    """
    width = 128
    path = make_experts(
        tmp_path / "model", "qwen3_moe", num_experts=64, num_experts_per_tok=4, num_hidden_layers=3,
        hidden_size=width, moe_intermediate_size=width,
    )  # fmt: skip
    expert = 2 * width * 2 * width  # bytes of gate_up_proj in bf16
    layer = 64 * 3 * expert // 2
    skipped = {"bnb_4bit_skip_experts": True}
    config = loaded(path, torch.bfloat16).config.quantization_config  # first, so that nothing is cached later
    ids = torch.arange(256).view(4, 64) * 7 % 66
    passes: dict[int, tuple[int, ...]] = {}
    with Allocations(library()).active() as counted:

        def measured(number: int, **options: Any) -> None:
            monkeypatch.setattr(experts, "EXPERT_BYTES", max(1, number) * expert)
            counted.begin()
            counted.peaks.clear()
            with counted.phase("load"):
                model = loaded(path, torch.bfloat16, **options)
            model.requires_grad_(False).enable_input_require_grads()
            counted.begin()
            with counted.phase("forward"):
                loss = model(input_ids=ids, use_cache=False).logits.float().sum()
            with counted.phase("backward"):
                loss.backward()
            passes[number] = (counted.peaks["forward"], counted.peaks["backward"], counted.after["forward"])

        measured(64)
        for number in (8, 1):  # on a CPU, quantizing a group needs ten times its memory
            measured(number)
            assert counted.peaks["load"] <= counted.after["load"] + 2 * layer
        assert counted.after["load"] < layer, "all three layers in 4 bits"
        measured(0, **skipped)
        counted.begin()
        with counted.phase("late"):
            model = loaded(path, torch.bfloat16, **skipped)
            for name, weight in experts.plain_experts(model).items():
                module, _, own = name.rpartition(".")
                setattr(model.get_submodule(module), own, experts.pack(weight.data, config))
        assert min(counted.peaks["load"], counted.peaks["late"]) > 3 * layer
    plain = passes[0]
    for number in (1, 8, 64):
        forward, backward, kept = passes[number]
        assert kept == plain[2]
        assert max(forward - plain[0], backward - plain[1]) <= 1.1 * number * expert
    assert min(passes[64][0] - passes[8][0], passes[64][1] - passes[8][1]) >= 20 * expert, "the limit has an effect"


def live(model: PreTrainedModel, stage: int = 2) -> Quantization:
    """Return the plan for a live model."""
    args = KTOConfig("out", use_peft=True)
    source = model_source(model, "model", args)
    plan = quantized(source, args, key="model", in_4bit=False, compute=torch.float32, stage=stage).quantization
    assert plan is not None
    return plan


def test_live_models(models: dict[str, str]) -> None:
    """The experts of a user's model are not quantized; those of a model that was loaded here are."""
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(models["olmoe"], quantization_config=config, dtype=torch.float32)
    assert ", except experts (" in live(plain, stage=3).describe()
    own = loaded(models["olmoe"])
    assert {*live(own).packed_experts} == experts.packed_experts(own).keys()
    assert live(own) == live(copy.deepcopy(own))
    with pytest.raises(OptionError, match="^model: ZeRO stage 3 cannot partition quantized experts"):
        live(own, stage=3)


def test_checkpoints_with_packed_experts_are_refused(models: dict[str, str], tmp_path: Path) -> None:
    """As other tools save them; those with packed linear layers only are loaded."""
    before = loaded(models["qwen3_moe"], bnb_4bit_skip_experts=True)
    before.save_pretrained(tmp_path)
    args = KTOConfig("out", use_peft=True)

    def again() -> PreTrainedModel:
        source = model_source(str(tmp_path), "model_name_or_path", args)
        source = quantized(source, args, key="model", in_4bit=False, compute=torch.float32, stage=0)
        return source.load(args, torch.float32, {}, torch.device("cpu")).eval()

    assert torch.equal(logps(again()), logps(before))
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if ".experts." in name]:
        packed = bnb.nn.Params4bit(weights[name], False, quant_type="nf4").to("cpu")
        weights |= {name: packed.data}
        weights |= {f"{name}.{key}": value for key, value in packed.quant_state.as_dict(packed=True).items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"experts\.down_proj.*; quantized experts cannot .*load_in_4bit: true"):
        again()


def logged(path: str, folder: Path, **more: Any) -> list[dict[str, float]]:
    """Return the log of two steps of DPO at stage 2."""
    given = {"use_peft": True, "load_in_4bit": True, "optim": "sgd", "learning_rate": 0.3, "max_steps": 2}
    args = DPOConfig(**options(folder, deepspeed=STAGES["stage2"], **given, **more))
    trainer = DPOTrainer(model=path, args=args, train_dataset=paired_rows(8))
    trainer.train()
    trainer.close()
    return [{n: v for n, v in entry.items() if isinstance(v, float)} for entry in trainer.state.log_history[:2]]


def test_a_replica_and_the_storage_change_nothing(models: dict[str, str], tmp_path: Path) -> None:
    """A reference of its own equals the policy without adapters; bytes equal weights of the compute dtype."""
    path = models["mixtral"]
    runs = {
        name: logged(path, tmp_path / name, **more)
        for name, more in {
            "adapter": {"dtype": "float32"},
            "replica": {"dtype": "float32", "ref_placement": "replica"},
            "bfloat16": {"dtype": "bfloat16"},
            "uint8": {"dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8"},
        }.items()
    }
    for one, other in (("adapter", "replica"), ("bfloat16", "uint8")):
        for left, right in zip(runs[one], runs[other], strict=True):
            assert left == pytest.approx(right, rel=1e-5, abs=1e-6)
    assert abs(runs["adapter"][1]["rewards/margins"]) > 0.01


@pytest.fixture(scope="module")
def found(
    models: dict[str, str], tmp_path_factory: pytest.TempPathFactory, ranks: RankServer, request: pytest.FixtureRequest
) -> Results:
    """Train the runs of the selected tests only."""
    folder = tmp_path_factory.mktemp("trained")
    return outcomes(selected_cases(request, _TRAINED), models, folder / "starts", folder, ranks)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.mark.ci
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_step_matches_peft_on_dequantized_experts(case: Combination, found: Results, oracle: Oracle) -> None:
    outcome = found[name_of(case)]
    # In fp32, gradients of Gemma 4 have three times the rounding error of others, quantized or not.
    check(outcome, oracle(outcome), 1e-4 if case["architecture"] == "gemma4_text" else CLOSE)
