"""Merging adapters into full models: equality with PEFT's forward pass, exact reports, and unsupported adapters."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import ROOT
from exports import FOUR_BITS, command, gap, mean_logp
from helpers import make_classifier, make_model, paired_rows
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_adapters import CAUSAL, LAYERS, logps, lora, make_adapter, moved
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig

from alignment.checkpoint.exporting.adapter import merge_adapter
from alignment.checkpoint.exporting.check import OutputChange, dataset_samples, default_samples
from alignment.checkpoint.exporting.folder import REPORT
from alignment.checkpoint.exporting.report import advice
from alignment.cli import export
from alignment.config.errors import AlignmentError, OptionError, OutputError
from alignment.models.adapters.folder import TRAINING_BASE, read_adapter, write_training_base
from alignment.models.adapters.survival import SurvivalMeter
from alignment.models.tasks import CAUSAL_LM, REWARD_MODEL
from alignment.models.wide_forward import computing_in_fp32
from alignment.run.activity import ACTIVITY
from tools.ranks.client import environment


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: make_model(tmp_path_factory.mktemp(kind), kind) for kind in ("tied", "untied", "moe")}


@pytest.fixture(scope="module")
def adapter(bases: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("lora"), bases["tied"], lora())


def exported(adapter: Path, out: Path, **more: Any) -> Any:
    merge_adapter(adapter, out, **{"dtype": "float32", "sample_count": 0, **more})
    return AutoModelForCausalLM.from_pretrained(out)


# Equal to PEFT -------------------------------------------------------------------------------------------------------

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: dict[str, tuple[str, peft.PeftConfig]] = {
    "lora": ("tied", lora(lora_dropout=0.3)),
    "rslora": ("untied", lora(use_rslora=True)),
    "dora": ("tied", lora(use_dora=True)),
    "pissa": ("tied", lora(init_lora_weights="pissa")),
    "bias": ("tied", lora(bias="all")),
    "ia3": (
        "tied",
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **CAUSAL),
    ),
    "loha": ("tied", peft.LoHaConfig(r=4, target_modules=LAYERS, **CAUSAL)),
    "lokr": ("tied", peft.LoKrConfig(r=4, target_modules=LAYERS, **CAUSAL)),
    "oft": ("tied", peft.OFTConfig(oft_block_size=8, r=0, target_modules=["q_proj", "v_proj"], **CAUSAL)),
    "experts": ("moe", lora(r=2, target_modules=["q_proj"], target_parameters=EXPERTS)),
}
BRIEF = ("lora", "bias", "experts")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in BRIEF else pytest.mark.ci) for k in KINDS])
def test_an_fp32_export_computes_the_same_as_peft(kind: str, bases: dict[str, str], tmp_path: Path) -> None:
    base, config = KINDS[kind]
    adapter = make_adapter(tmp_path / "adapter", bases[base], config)
    plain = AutoModelForCausalLM.from_pretrained(bases[base])
    without = logps(plain)
    ours, theirs = logps(exported(adapter, tmp_path / "out")), logps(PeftModel.from_pretrained(plain, adapter))
    assert (theirs - without).abs().max() > 0.05
    assert (ours - theirs).abs().max() < 1e-5


# base model, trained end (embedding or head), whether the export is tied
ENDS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "untouched": ("tied", {}, True),
    "saved_head": ("tied", {"modules_to_save": ["lm_head"]}, False),
    "saved_embedding": ("tied", {"modules_to_save": ["embed_tokens"]}, False),
    "saved_and_kept_tied": ("tied", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
    "both_of_untied": ("untied", {"modules_to_save": ["embed_tokens", "lm_head"]}, False),
    "adapted_embedding": ("tied", {"target_modules": [*LAYERS, "embed_tokens"]}, False),
    "adapted_head": ("tied", {"target_modules": [*LAYERS, "lm_head"]}, False),
    "adapted_and_kept_tied": (
        "tied",
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
        True,
    ),
    "some_tokens": ("tied", {"trainable_token_indices": [3, 5]}, True),
}


@pytest.mark.ci
@pytest.mark.parametrize("ends", ENDS)
def test_a_tied_base_with_a_trained_embedding_or_head(ends: str, bases: dict[str, str], tmp_path: Path) -> None:
    base, more, tied = ENDS[ends]
    adapter = make_adapter(tmp_path / "adapter", bases[base], lora(**more))
    theirs = logps(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases[base]), adapter))
    model = exported(adapter, tmp_path / "out")
    assert (logps(model) - theirs).abs().max() < 1e-5
    assert model.config.tie_word_embeddings is tied is (model.lm_head.weight is model.model.embed_tokens.weight)
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) is not tied


def test_an_adapted_embedding_that_was_saved_without_its_base(bases: dict[str, str], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(bases["tied"])
    model = moved(peft.get_peft_model(model, lora(target_modules=["embed_tokens"])))
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    ours = exported(tmp_path / "adapter", tmp_path / "out")
    assert (logps(ours) - logps(model)).abs().max() < 1e-5 and not ours.config.tie_word_embeddings


@pytest.mark.ci
@pytest.mark.parametrize("saved", [["embed_tokens", "lm_head"], None], ids=["trained", "resized only"])
def test_new_tokens(saved: list[str] | None, bases: dict[str, str], tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(bases["tied"])
    base.resize_token_embeddings(90)
    model = moved(peft.get_peft_model(base, lora(modules_to_save=saved)))
    model.save_pretrained(tmp_path / "adapter")
    ours = exported(tmp_path / "adapter", tmp_path / "out", base=bases["tied"], sample_count=2)
    assert ours.config.vocab_size == 90 and ours.config.tie_word_embeddings is (saved is None)
    assert (logps(ours, 90) - logps(model, 90)).abs().max() < 1e-5


@pytest.mark.ci
@pytest.mark.parametrize("start", ["causal", "classifier"])
def test_a_classifier_keeps_its_trained_score(start: str, bases: dict[str, str], tmp_path: Path) -> None:
    base = bases["tied"] if start == "causal" else make_classifier(tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    moved(peft.get_peft_model(model, lora(task_type="SEQ_CLS"))).save_pretrained(tmp_path / "adapter")
    report = merge_adapter(tmp_path / "adapter", tmp_path / "out", dtype="float32", sample_count=2)
    ours = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(12)[None]
    assert ours.config.num_labels == 1 and ours.config.architectures == ["LlamaForSequenceClassification"]
    with torch.no_grad():
        assert (ours(ids).logits - model.eval()(ids).logits).abs().max() < 1e-5
    assert report.task == "classifier" and report.change is not None and report.change.what == "score"
    assert report.change.share < 1e-3 and report.change.effect_mean > 1e-2


@pytest.mark.ci
@pytest.mark.parametrize(
    ("method", "recorded"),
    [(FOUR_BITS, True), (FOUR_BITS, False), ({"load_in_8bit": True}, True)],
    ids=["nf4_recorded", "nf4_given", "int8_recorded"],
)
def test_a_quantized_base_is_dequantized_for_merging(
    method: dict[str, Any], recorded: bool, bases: dict[str, str], tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "adapter", bases["tied"], lora())
    given: dict[str, Any] = {"dtype": "auto", "quantization": method}
    config = BitsAndBytesConfig(**method)
    dtype = torch.float32 if recorded else torch.bfloat16
    if recorded:
        write_training_base(
            adapter, base_model=bases["tied"], revision=None, quantization=config.to_dict(), task=CAUSAL_LM,
            dtype="float32",
        )  # fmt: skip
        given = {"dtype": "auto"}
    else:
        given["dtype"] = "float32"
    told: list[str] = []
    ours = exported(adapter, tmp_path / "out", tell=told.append, **given)
    packed = AutoModelForCausalLM.from_pretrained(
        bases["tied"], quantization_config=config, dtype=dtype, device_map={"": "cpu"}
    )
    dense = PeftModel.from_pretrained(packed.dequantize(dtype=torch.float32).float(), adapter)
    original = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases["tied"]), adapter)
    assert ours.dtype == torch.float32 and getattr(ours.config, "quantization_config", None) is None
    assert (logps(ours) - logps(dense)).abs().max() < 1e-5
    assert (logps(ours) - logps(original)).abs().max() > 1e-3
    assert any("its dequantized weights are merged" in line for line in told)


# Survival ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "cosine"), [(5e-4, 0.47), (5e-5, 0.15)])
def test_survival_of_a_small_update_in_bf16(size: float, cosine: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1000, 1000, generator=generator).bfloat16()
    factors = torch.randn(1000, 16, generator=generator), torch.randn(16, 1000, generator=generator)
    update = (factors[0] @ factors[1] / 4 * size).double()
    merged = weights.double() + update
    meter = SurvivalMeter()
    meter.add("w", weights, merged.float(), torch.bfloat16)
    kept = merged.bfloat16().double() - weights.double()
    expected = float((kept * update).sum() / kept.norm() / update.norm())
    assert meter.total.cosine == pytest.approx(expected, rel=2e-3) and expected == pytest.approx(cosine, abs=0.01)
    assert meter.total.norm_ratio == pytest.approx(float(kept.norm() / update.norm()), rel=2e-3)
    assert meter.total.update == pytest.approx(size, rel=0.02)


def test_survival_over_several_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignment.models.adapters.survival._CHUNK", 7)  # several chunks
    meter, generator = SurvivalMeter(), torch.Generator().manual_seed(0)
    us, vs = [], []
    for name, size in (("large", 1e-1), ("none", 0.0), ("small", 1e-3)):
        weights = torch.randn(4, 5, generator=generator).bfloat16()
        merged = weights.float() + size * torch.randn(4, 5, generator=generator)
        meter.add(name, weights, merged, torch.bfloat16)
        us.append(merged.double() - weights.double())
        vs.append(merged.bfloat16().double() - weights.double())
    u, v = torch.stack(us).flatten(), torch.stack(vs).flatten()
    assert meter.tensors == 3 and meter.total.cosine == pytest.approx(float(u @ v / u.norm() / v.norm()), rel=1e-6)
    assert meter.worst is not None and meter.worst.name == "small"
    assert meter.worst.cosine == pytest.approx(float(torch.cosine_similarity(us[2].flatten(), vs[2].flatten(), 0)))


def test_a_bf16_export_rounds_once_and_reports_the_loss(tmp_path: Path) -> None:
    base = make_model(tmp_path / "fp32", "tied")
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    adapter = make_adapter(tmp_path / "adapter", str(tmp_path / "base"), lora(), size=1e-3)
    report = merge_adapter(adapter, tmp_path / "out", sample_count=4)
    assert report.dtype == "bfloat16" and report.tensors == 8
    state, tensors = (
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(adapter / "adapter_model.safetensors"),
    )
    given = load_file(tmp_path / "base" / "model.safetensors")
    u, v = [], []
    for name, tensor in state.items():
        a = tensors.get(f"base_model.model.{name.removesuffix('weight')}lora_A.weight")
        if a is None:
            assert torch.equal(tensor, given[name])
            continue
        b = tensors[f"base_model.model.{name.removesuffix('weight')}lora_B.weight"]
        delta = 8 / 4 * (b.double() @ a.double())
        wide = given[name].double() + delta
        assert (tensor.double() - wide).abs().max() <= (wide.abs() * 2**-8).max()
        assert (
            tensor != wide.bfloat16()
        ).float().mean() < 1e-3  # a tie between two adjacent fp32 numbers, or no difference
        u.append(delta.flatten())
        v.append((wide.bfloat16().double() - given[name].double()).flatten())
    wanted, left = torch.cat(u), torch.cat(v)
    cosine = float(wanted @ left / wanted.norm() / left.norm())
    assert report.survival.cosine == pytest.approx(cosine, abs=1e-3) and 0.8 < cosine < 0.99
    assert report.change is not None and report.change.share > 0.1 and "--dtype float32" in (report.advice or "")
    # computed independently: base model with adapter, and the export, both in fp32
    rows = default_samples(AutoTokenizer.from_pretrained(base), 77, 4)
    assert report.change.source == "random tokens"  # the base model has no tokenizer
    rows = default_samples(None, 77, 4)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base").float()
    before = [mean_logp(plain, row) for row in rows.rows]
    with_adapter = PeftModel.from_pretrained(plain, adapter)
    during = [mean_logp(with_adapter, row) for row in rows.rows]
    after = [mean_logp(AutoModelForCausalLM.from_pretrained(tmp_path / "out").float(), row) for row in rows.rows]
    assert report.change.error_mean == pytest.approx(gap(after, during), rel=1e-2)
    assert report.change.effect_mean == pytest.approx(gap(during, before), rel=1e-2)
    stored = json.loads((tmp_path / "out" / REPORT).read_text())
    assert stored["survival"]["cosine"] == report.survival.cosine and stored["change"]["share"] == report.change.share
    assert "a cosine of 0.9" in "\n".join(report.lines())


@pytest.mark.ci
def test_bf16_experts_are_rounded_once(bases: dict[str, str], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(bases["moe"], dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    config = lora(r=2, target_modules=["q_proj"], target_parameters=EXPERTS)
    adapter = make_adapter(tmp_path / "adapter", str(tmp_path / "base"), config, size=0.05)
    ours = exported(adapter, tmp_path / "out", dtype="bfloat16").state_dict()
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "base").float()
    theirs = PeftModel.from_pretrained(wide, adapter).merge_and_unload().state_dict()
    for name, tensor in ours.items():
        assert (tensor != theirs[name].bfloat16()).float().mean() < 1e-3, name


def test_saved_tensors_keep_the_files_precision(bases: dict[str, str], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(bases["untied"], dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    adapter = make_adapter(tmp_path / "adapter", str(tmp_path / "base"), lora(modules_to_save=["lm_head"]))
    state = load_file(adapter / "adapter_model.safetensors")
    saved = state["base_model.model.lm_head.weight"].float() * 1.001
    save_file(state | {"base_model.model.lm_head.weight": saved}, adapter / "adapter_model.safetensors")
    assert torch.equal(exported(adapter, tmp_path / "out").lm_head.weight, saved)


@pytest.mark.parametrize(
    ("error", "effect", "dtype", "expected"),
    [
        (0.01, 1.0, "bfloat16", None),
        (0.2, 1.0, "bfloat16", "--dtype float32"),
        (0.2, 1.0, "float32", "keep the adapter"),
        (0.2, 0.0, "bfloat16", "training changed nothing"),
        (0.0, 0.0, "bfloat16", None),
    ],
)
def test_advice(error: float, effect: float, dtype: str, expected: str | None) -> None:
    given = advice(OutputChange("log-prob per token", "rows", 8, error, error, effect), dtype)
    assert given is None if expected is None else expected in (given or "")


def test_a_16_bit_model_computes_temporarily_in_fp32(bases: dict[str, str], adapter: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(bases["tied"], dtype=torch.bfloat16)
    wide = logps(AutoModelForCausalLM.from_pretrained(bases["tied"], dtype=torch.bfloat16).float())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with computing_in_fp32(model):
        inside = logps(model)
    assert torch.equal(inside, wide) and (logps(model) - wide).abs().max() > 1e-3
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


# The folder ----------------------------------------------------------------------------------------------------------


def test_the_folder_has_tokenizer_and_generation_config(bases: dict[str, str], adapter: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(bases["untied"])
    base.generation_config.max_length = 33
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(bases["untied"]).save_pretrained(tmp_path / "base")
    own = make_adapter(tmp_path / "adapter", str(tmp_path / "base"), lora())
    (tmp_path / "first").mkdir()  # an empty folder is treated like a missing one
    model = exported(own, tmp_path / "first", max_shard_size="20KB")
    assert model.generation_config.max_length == 33 and len(list((tmp_path / "first").glob("*.safetensors"))) > 2
    assert not [path for path in (tmp_path / "first").iterdir() if path.name.startswith(".")]
    assert AutoTokenizer.from_pretrained(tmp_path / "first").chat_template is not None
    tokenizer = AutoTokenizer.from_pretrained(bases["untied"])
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(own)
    exported(own, tmp_path / "second")
    assert AutoTokenizer.from_pretrained(tmp_path / "second").chat_template == tokenizer.chat_template


def test_the_record_written_by_training(bases: dict[str, str], adapter: Path, tmp_path: Path) -> None:
    own = make_adapter(tmp_path / "adapter", bases["tied"], lora())
    write_training_base(own, base_model="named/elsewhere", revision="abc", quantization=FOUR_BITS, task=REWARD_MODEL)
    seen = read_adapter(own)
    assert (seen.base, seen.revision, seen.quantization) == ("named/elsewhere", "abc", FOUR_BITS)
    assert seen.task is REWARD_MODEL and read_adapter(own, base="here").revision is None
    assert read_adapter(adapter).base == bases["tied"] and read_adapter(adapter).task is CAUSAL_LM


def test_rows_to_compare_on(bases: dict[str, str], tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bases["tied"])
    file = tmp_path / "pairs.jsonl"
    pairs = paired_rows(5)
    file.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    rows = dataset_samples(str(file), tokenizer, 77, 3)
    assert rows.source == str(file) and len(rows.rows) == 3
    assert tokenizer.decode(rows.rows[0], skip_special_tokens=True) == pairs[0]["prompt"] + pairs[0]["chosen"]
    built_in = default_samples(tokenizer, 77)
    assert built_in.source == "built-in texts" and "assistant: " in tokenizer.decode(built_in.rows[0])
    assert (
        default_samples(None, 77) == default_samples(None, 77) and default_samples(None, 77).source == "random tokens"
    )


# Refused -------------------------------------------------------------------------------------------------------------


def refused(*arguments: Any, **more: Any) -> str:
    with pytest.raises(AlignmentError) as caught:
        merge_adapter(*arguments, **more)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_output_that_cannot_be_written(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(OutputError, match="full is not empty"):
        merge_adapter(adapter, tmp_path / "full")
    with pytest.raises(OutputError, match="is a file"):
        merge_adapter(adapter, tmp_path / "full" / "file")
    with pytest.raises(OptionError, match="dtype='int8'"):
        merge_adapter(adapter, tmp_path / "out", dtype="int8")
    with pytest.raises(OptionError, match="samples=-1"):
        merge_adapter(adapter, tmp_path / "out", sample_count=-1)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_an_adapter(bases: dict[str, str], adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "does not exist" in refused(tmp_path / "nowhere", out)
    assert "contains a full model (config.json, no adapter_config.json), not an adapter" in refused(
        Path(bases["tied"]), out
    )
    assert f"it has adapters in: {adapter.name}" in refused(adapter.parent, out)
    (tmp_path / "file").touch()
    assert "is a file" in refused(tmp_path / "file", out)


def changed(folder: Path, adapter: Path, **values: Any) -> Path:
    """Copy an adapter with modified configuration values."""
    folder.mkdir()
    for file in adapter.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "adapter_config.json").read_text()) | values
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_truncated_or_empty_weights(adapter: Path, tmp_path: Path) -> None:
    own = changed(tmp_path / "own", adapter)
    file, out = own / "adapter_model.safetensors", tmp_path / "out"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    assert "adapter_model.safetensors is truncated or corrupt" in refused(own, out)
    state = {name: tensor[:0] for name, tensor in load_file(adapter / file.name).items()}
    save_file(state, file)
    assert "ZeRO-3" in refused(own, out)
    file.unlink()
    assert "adapter_model.safetensors is missing" in refused(own, out)
    (own / "adapter_model.bin").touch()
    assert "pickle" in refused(own, out)
    (own / TRAINING_BASE).write_text('{"task": "poetry"}')
    file.write_bytes(whole)
    assert TRAINING_BASE in refused(own, out)
    (own / "adapter_config.json").write_text("{")
    assert "adapter_config.json cannot be read" in refused(own, out)


def test_types_that_cannot_be_merged(bases: dict[str, str], adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prompt = peft.PromptTuningConfig(num_virtual_tokens=2, **CAUSAL)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(bases["tied"]), prompt).save_pretrained(
        tmp_path / "prompt"
    )
    assert "PROMPT_TUNING is a prompt learning method" in refused(tmp_path / "prompt", out)
    vera = changed(tmp_path / "vera", adapter)
    peft.VeraConfig(target_modules=["q_proj"]).save_pretrained(vera)
    assert "type VERA cannot be exported" in refused(vera, out)
    assert "duplicates layers" in refused(changed(tmp_path / "again", adapter, layer_replication=[[0, 1]]), out)
    assert "TOKEN_CLS" in refused(changed(tmp_path / "task", adapter, task_type="TOKEN_CLS"), out)


def test_a_base_that_does_not_match(bases: dict[str, str], adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = refused(adapter, out, base=bases["moe"])
    assert "does not fit its base" in text and bases["moe"] in text
    config = json.loads((Path(bases["tied"]) / "config.json").read_text())
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps(config | {"hidden_size": 16}))
    save_file({"nothing": torch.zeros(1)}, small / "model.safetensors")
    text = refused(adapter, out, base=str(small))
    assert "model.layers.0.mlp.down_proj.lora_B.weight has shape [32, 4]; expected [16, 4]" in text
    own = changed(tmp_path / "own", adapter)
    state = load_file(own / "adapter_model.safetensors")
    first = sorted(state)[0]
    save_file({name: tensor for name, tensor in state.items() if name != first}, own / "adapter_model.safetensors")
    assert f"the adapter has no tensor {first.removeprefix('base_model.model.')}" in refused(own, out)
    save_file(state | {"base_model.model.other.weight": torch.ones(1)}, own / "adapter_model.safetensors")
    assert "the unexpected tensor other.weight" in refused(own, out)
    assert "/nowhere" in refused(adapter, out, base="/nowhere")
    assert "does not name a base model" in refused(
        changed(tmp_path / "nameless", adapter, base_model_name_or_path=None), out
    )
    save_file(state | {first: state[first] * torch.inf}, own / "adapter_model.safetensors")
    assert "contains NaN or infinite values" in refused(own, out, sample_count=0)
    assert not out.exists() and not list(tmp_path.glob(".*"))


def test_other_quantization_methods(
    bases: dict[str, str], adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((Path(bases["tied"]) / "config.json").read_text())
    for method in ("gptq", "awq"):
        base = tmp_path / method
        base.mkdir()
        (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
        save_file({"nothing": torch.zeros(1)}, base / "model.safetensors")
        assert f"quantized with {method}" in refused(adapter, tmp_path / "out", base=str(base))
    monkeypatch.setattr("alignment.models.adapters.merge_base.find_spec", lambda name: None)
    assert "pip install bitsandbytes" in refused(adapter, tmp_path / "out", quantization=FOUR_BITS)


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = command(capsys, str(adapter), str(tmp_path / "out"), "--load_in_4bit", "--samples", "2")
    assert (code, err) == (0, "")
    assert "its dequantized weights are merged" in out and "log-prob per token on 2 rows (built-in texts)" in out
    assert f"{REPORT}: {tmp_path / 'out'}" in out
    code, out, err = command(capsys, str(adapter), str(tmp_path / "out"))
    assert (code, out) == (
        1,
        "",
    ) and err == f"error: {tmp_path / 'out'} is not empty; pass a folder that does not " + (
        "exist yet, or empty this one\n"
    )


def test_wrong_usage(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = command(capsys, str(adapter))
    assert (code, out) == (2, "") and err.startswith("usage: da export ") and "OUT" in err
    assert command(capsys, str(adapter), "out", "--load_in_4bit", "--load_in_8bit")[0] == 2
    with monkeypatch.context() as two:
        two.setenv("WORLD_SIZE", "2")
        code, out, err = command(capsys, str(adapter), str(tmp_path / "out"))
    assert (code, out, err) == (
        1,
        "",
        "error: da export must run in a single process, but WORLD_SIZE is 2; start it without a launcher\n",
    )
    monkeypatch.setattr("alignment.cli.export.find_spec", lambda name: None)
    code, out, err = command(capsys, str(adapter), str(tmp_path / "out"), "--load_in_8bit")
    assert code == 1 and "--load_in_8bit requires bitsandbytes" in err


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys, runpy\n"
        "sys.argv = ['launch/export.py', '--help']\n"
        "try: runpy.run_path('launch/export.py', run_name='__main__')\n"
        "except SystemExit as leaving: print(leaving.code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(PYTHONPATH=str(ROOT)), text=True, capture_output=True
    )
    assert done.stdout.startswith("usage: launch/export.py") and done.stdout.endswith("0 False\n"), done.stderr


def test_an_export_has_no_time_limit(tmp_path: Path) -> None:
    """None of its phases has a time limit for hang detection."""
    with pytest.raises(AlignmentError):
        export._run(export._parser("export").parse_args([str(tmp_path / "absent"), str(tmp_path / "out")]))
    limit = ACTIVITY.limit
    ACTIVITY.reset()
    assert limit == math.inf > ACTIVITY.limit
