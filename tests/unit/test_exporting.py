"""Export of merged adapters and of full models: equality with PEFT, master weights, rounding, and what is refused."""

from __future__ import annotations

import copy
import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear
from safetensors.torch import load_file, save_file
from support.exports import command, gap, mean_logp, refused
from support.helpers import make_model, paired_rows
from support.tiny_adapters import CAUSAL, LAYERS, logps, lora, make_adapter, moved
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, LlamaForCausalLM

from alignment import SFTConfig
from alignment.checkpoint import export as export_module
from alignment.checkpoint import masters as masters_module
from alignment.checkpoint.comparison import sample_rows
from alignment.checkpoint.export import ExportReport, _tokenizer, export
from alignment.checkpoint.manifest import Manifest, files_in, record_of
from alignment.checkpoint.masters import checked_masters
from alignment.checkpoint.run_folder import REPORT
from alignment.cli import export as command_line
from alignment.config.errors import CheckpointError, ModelError, OptionError, OutputError
from alignment.config.options_export import ExportOptions
from alignment.models.adapters.folder import read_adapter, write_training_base
from alignment.models.adapters.plan import plan_adapters
from alignment.models.adapters.record import TRAINING_BASE
from alignment.models.source import model_source
from alignment.models.tasks import CAUSAL_LM
from alignment.models.vocabulary import resize
from alignment.run.activity import ACTIVITY

FILE, ADAPTER = "model.safetensors", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: make_model(tmp_path_factory.mktemp(kind), kind) for kind in ("tied", "untied", "moe")}


@pytest.fixture(scope="module")
def adapter(bases: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("lora"), bases["tied"], lora())


def exported(adapter: Path, out: Path, **more: Any) -> Any:
    export(adapter, out, ExportOptions(**{"dtype": "float32", "samples": 0, **more}))
    return AutoModelForCausalLM.from_pretrained(out)


# Equal to PEFT -------------------------------------------------------------------------------------------------------

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: dict[str, tuple[str, peft.PeftConfig]] = {
    "lora": ("tied", lora(lora_dropout=0.3)),
    "dora": ("tied", lora(use_dora=True)),
    "bias": ("tied", lora(bias="all")),
    "ia3": ("tied", peft.IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=["v_proj"], **CAUSAL)),
    "lokr": ("tied", peft.LoKrConfig(r=4, target_modules=LAYERS, **CAUSAL)),
    "oft": ("tied", peft.OFTConfig(oft_block_size=8, r=0, target_modules=["q_proj", "v_proj"], **CAUSAL)),
    "experts": ("moe", lora(r=2, target_modules=["q_proj"], target_parameters=EXPERTS)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_fp32_export_computes_the_same_as_peft(kind: str, bases: dict[str, str], tmp_path: Path) -> None:
    base, config = KINDS[kind]
    adapter = make_adapter(tmp_path / "adapter", bases[base], config)
    plain = AutoModelForCausalLM.from_pretrained(bases[base])
    without = logps(plain)
    model, theirs = exported(adapter, tmp_path / "out"), logps(PeftModel.from_pretrained(plain, adapter))
    assert (theirs - without).abs().max() > 0.05 > 1e-5 > (logps(model) - theirs).abs().max()
    assert model.config.tie_word_embeddings == (base == "tied")


# base model, trained end (embedding or head), whether the export is tied
ENDS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "saved_head": ("tied", {"modules_to_save": ["lm_head"]}, False),
    "saved_and_kept_tied": ("tied", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
    "adapted_embedding": ("tied", {"target_modules": [*LAYERS, "embed_tokens"]}, False),
    "some_tokens": ("tied", {"trainable_token_indices": [3, 5]}, True),
}


@pytest.mark.parametrize("ends", ENDS)
def test_a_tied_base_with_a_trained_embedding_or_head(ends: str, bases: dict[str, str], tmp_path: Path) -> None:
    base, more, tied = ENDS[ends]
    adapter = make_adapter(tmp_path / "adapter", bases[base], lora(**more))
    theirs = logps(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases[base]), adapter))
    model = exported(adapter, tmp_path / "out")
    assert (logps(model) - theirs).abs().max() < 1e-5
    assert model.config.tie_word_embeddings is tied is (model.lm_head.weight is model.model.embed_tokens.weight)
    assert ("lm_head.weight" in load_file(tmp_path / "out" / FILE)) is not tied


def test_an_adapted_embedding_that_was_saved_without_its_base(bases: dict[str, str], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(bases["tied"])
    model = moved(peft.get_peft_model(model, lora(target_modules=["embed_tokens"])))
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    ours = exported(tmp_path / "adapter", tmp_path / "out")
    assert (logps(ours) - logps(model)).abs().max() < 1e-5 and not ours.config.tie_word_embeddings


def test_a_head_that_was_saved_in_fp32_is_not_rounded_to_its_base(bases: dict[str, str], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(bases["untied"], dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    config = lora(modules_to_save=["lm_head"])
    adapter = make_adapter(tmp_path / "adapter", str(tmp_path / "base"), config, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base").float(), adapter)
    assert (logps(exported(adapter, tmp_path / "out")) - logps(theirs)).abs().max() < 1e-5


FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@pytest.mark.parametrize("case", ["nf4_recorded", "nf4_given", "int8_recorded"])
def test_a_quantized_base_is_dequantized_for_merging(case: str, bases: dict[str, str], tmp_path: Path) -> None:
    method, recorded = FOUR_BITS if "nf4" in case else {"load_in_8bit": True}, "recorded" in case
    adapter = make_adapter(tmp_path / "adapter", bases["tied"], lora())
    config: Any = BitsAndBytesConfig(**method)
    dtype = torch.float32 if recorded else torch.bfloat16
    if recorded:
        known = {"base_model": bases["tied"], "quantization": config.to_dict(), "dtype": "float32"}
        write_training_base(adapter, revision=None, task=CAUSAL_LM, **known)
    options = ExportOptions(dtype="auto" if recorded else "float32", load_in_4bit=not recorded, samples=0)
    assert export(adapter, tmp_path / "out", options).dequantized
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    packed = AutoModelForCausalLM.from_pretrained(
        bases["tied"], quantization_config=config, dtype=dtype, device_map={"": "cpu"}
    )
    dense = PeftModel.from_pretrained(packed.dequantize(dtype=torch.float32).float(), adapter)
    original = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases["tied"]), adapter)
    assert ours.dtype == torch.float32 and getattr(ours.config, "quantization_config", None) is None
    assert (logps(ours) - logps(dense)).abs().max() < 1e-5
    assert (logps(ours) - logps(original)).abs().max() > 1e-3


# Rounding ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lora", "experts"])
def test_a_bf16_export_rounds_once_and_reports_the_loss(kind: str, bases: dict[str, str], tmp_path: Path) -> None:
    base, config = KINDS[kind]
    AutoModelForCausalLM.from_pretrained(bases[base], dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    adapter = make_adapter(tmp_path / "adapter", str(tmp_path / "base"), config, size=0.01)
    report = export(adapter, tmp_path / "out", ExportOptions(samples=4))
    assert (report.dtype, report.rows, report.dequantized) == ("bfloat16", 4, False)
    wide = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base").float(), adapter)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    rows = sample_rows(ExportOptions(samples=4), None, ours.config)  # the base model has no tokenizer
    during, after = ([mean_logp(model, row) for row in rows] for model in (wide, copy.deepcopy(ours).float()))
    assert report.error_mean == pytest.approx(gap(after, during), rel=1e-2) and report.error_mean > 1e-5
    assert report.error_max == pytest.approx(max(abs(x - y) for x, y in zip(after, during)), rel=1e-2)
    theirs = wide.merge_and_unload().state_dict()
    for name, tensor in ours.state_dict().items():  # they differ at a tie between two adjacent fp32 numbers
        assert (tensor != theirs[name].bfloat16()).float().mean() < 1e-3, name
    stored = json.loads((tmp_path / "out" / REPORT).read_text())
    assert stored["error_mean"] == report.error_mean and stored["base_model"] == "base"


# The folder ----------------------------------------------------------------------------------------------------------


def test_the_folder_has_tokenizer_and_generation_config(bases: dict[str, str], tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(bases["untied"])
    base.generation_config.max_length = 33
    base.save_pretrained(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(bases["untied"])
    tokenizer.save_pretrained(tmp_path / "base")
    own = make_adapter(tmp_path / "adapter", str(tmp_path / "base"), lora())
    (tmp_path / "first").mkdir()  # an empty folder is treated like a missing one
    model = exported(own, tmp_path / "first", max_shard_size="20KB")
    assert model.generation_config.max_length == 33 and len(list((tmp_path / "first").glob("*.safetensors"))) > 2
    assert not [path for path in (tmp_path / "first").iterdir() if path.name.startswith(".")]
    assert AutoTokenizer.from_pretrained(tmp_path / "first").chat_template == tokenizer.chat_template
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(own)
    exported(own, tmp_path / "second")
    assert AutoTokenizer.from_pretrained(tmp_path / "second").chat_template == tokenizer.chat_template


def test_rows_to_compare_on(bases: dict[str, str], tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bases["tied"])
    file, pairs = tmp_path / "pairs.jsonl", paired_rows(5)
    file.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    config, given = AutoConfig.from_pretrained(bases["tied"]), ExportOptions(dataset_name=str(file), samples=3)
    rows = sample_rows(given, tokenizer, config)
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    assert texts == [pair["prompt"] + pair["chosen"] for pair in pairs[:3]]
    assert tokenizer.decode(sample_rows(ExportOptions(), tokenizer, config)[0]).count("sky") == 1
    small = type(config)(vocab_size=3)  # not that of the tokenizer
    assert max(max(row) for row in sample_rows(ExportOptions(), tokenizer, small)) < 3
    with pytest.raises(OptionError, match="dataset_name"):
        sample_rows(given, None, config)


# Refused -------------------------------------------------------------------------------------------------------------


def test_invalid_options() -> None:
    sizes: list[dict[str, Any]] = [{"max_shard_size": size} for size in ("0GB", "5XB")]
    for options in ({"dtype": "int8"}, {"samples": -1}, {"load_in_4bit": True, "load_in_8bit": True}, *sizes):
        with pytest.raises(OptionError, match=f"^{next(iter(options))}"):
            ExportOptions(**options)


def copied(source: Path, folder: Path, *without: str) -> Path:
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.name not in without:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def changed(folder: Path, adapter: Path, tensors: dict[str, torch.Tensor] | None = None, **values: Any) -> Path:
    """Copy an adapter with modified configuration values and tensors."""
    copied(adapter, folder)
    config = json.loads((folder / "adapter_config.json").read_text()) | values
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / ADAPTER)
    return folder


def test_bases_and_adapters_that_cannot_be_merged(bases: dict[str, str], adapter: Path, tmp_path: Path) -> None:
    out, state, file = tmp_path / "out", load_file(adapter / ADAPTER), tmp_path / "file"
    file.touch()
    with pytest.raises(OutputError, match=str(file)):
        export(adapter, file)
    first = min(state)
    refused(ModelError, bases["moe"], adapter, out, base=bases["moe"])
    config = json.loads((Path(bases["tied"]) / "config.json").read_text())
    for name, values, text in (
        ("small", {"hidden_size": 16}, "lora_A.default.weight"),
        ("gptq", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | values))
        save_file({"nothing": torch.zeros(1)}, tmp_path / name / FILE)
        refused(ModelError, text, adapter, out, base=str(tmp_path / name))
    without = changed(tmp_path / "without", adapter, {name: state[name] for name in state if name != first})
    refused(ModelError, first.removeprefix("base_model.model."), without, out)
    other = changed(tmp_path / "other", adapter, state | {"base_model.model.other.weight": torch.ones(1)})
    refused(ModelError, "other.weight", other, out)
    refused(ModelError, "/nowhere", adapter, out, base="/nowhere")
    refused(ModelError, "--base", changed(tmp_path / "nameless", adapter, base_model_name_or_path=None), out)
    for name, values in (
        ("VERA", {"peft_type": "VERA"}),
        ("layer_replication", {"layer_replication": [[0, 1]]}),
        ("TOKEN_CLS", {"task_type": "TOKEN_CLS"}),
    ):
        refused(ModelError, name, changed(tmp_path / name, adapter, **values), out)
    infinite = changed(tmp_path / "infinite", adapter, state | {first: state[first] * torch.inf})
    refused(ModelError, "is not finite", infinite, out, samples=0)


def test_code_of_a_tokenizer_is_trusted_only_if_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda where, **options: (where, options))
    for trusted in (True, False):
        given = {"revision": "main", "trust_remote_code": trusted}
        assert _tokenizer("owner/name", "main", trusted) == ("owner/name", given)


def test_the_base_of_an_adapter(adapter: Path, tmp_path: Path) -> None:
    """That of the call, else what the run has recorded, else PEFT's."""
    own = changed(tmp_path / "own", adapter, base_model_name_or_path="peft's")
    assert read_adapter(own).base == "peft's"
    (own / TRAINING_BASE).write_text('{"base_model": "theirs", "revision": "r"}')
    for given, found in ((None, ("theirs", "r")), ("mine", ("mine", None))):
        read = read_adapter(own, given)
        assert (read.base, read.revision, read.task) == (*found, CAUSAL_LM)
    assert read_adapter(own, None, "asked").revision == "asked"
    for recorded in ('{"base_model": "theirs", "merged": true}', '{"task": "no such task"}', "[]"):
        (own / TRAINING_BASE).write_text(recorded)
        with pytest.raises(ModelError, match=f"^{own}"):
            read_adapter(own)


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--load_in_4bit", "--use_bnb_nested_quant", "false", "--samples", "2"]
    code, out, err = command(capsys, *given, str(adapter), str(tmp_path / "out"))
    assert (code, err) == (0, "") and "dequantized weights" in out and "log-prob per token on 2 rows" in out
    assert f"{REPORT}: {tmp_path / 'out'}" in out
    for given, start in (([], "out: "), (["--samples", "-1"], "samples=-1")):
        code, out, err = command(capsys, str(adapter), str(tmp_path / "out"), *given)
        assert (code, out, err.count("\n")) == (1, "", 1) and err.startswith(f"error: {start}")
    code, out, err = command(capsys, str(adapter))
    assert (code, out) == (2, "") and err.startswith("usage: da export ") and "OUT" in err
    assert command(capsys, str(adapter), "out", "--load_in_4bit", "--load_in_8bit")[0] == 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = command(capsys, str(adapter), str(tmp_path / "out"))
    assert (code, out) == (1, "") and err.startswith("error: da export must run in a single process")


def test_an_export_has_no_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of its phases has a time limit for hang detection."""
    limits: list[float] = []
    monkeypatch.setattr(command_line, "_run", lambda **given: limits.append(ACTIVITY.limit))
    with pytest.raises(SystemExit, match="^0$"):
        command_line.main([str(tmp_path / "absent"), str(tmp_path / "out")])
    assert limits == [math.inf] and ACTIVITY.limit < math.inf


# Full models ---------------------------------------------------------------------------------------------------------

OPTIMIZER = "optimizer-00001-of-00001.safetensors"
Giving = Callable[[dict[str, Tensor]], None]
Named = dict[str, Tensor]


def trained(folder: Path, base: str, size: float, dtype: torch.dtype = torch.bfloat16) -> Named:
    """Save a checkpoint of a trained model, rounded to ``dtype``; return the fp32 weights by name."""
    model = AutoModelForCausalLM.from_pretrained(base)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=size)
    masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.to(dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return masters


def add_manifest(folder: Path, **options: Any) -> None:
    files = {name: record_of(folder / name) for name in files_in(folder)}
    Manifest("run", 4, "kto", 2, 3, 8, 8, True, {"torch": "2.9"}, {}, options, files).write(folder)


@pytest.fixture(scope="module")
def base(bases: dict[str, str]) -> str:
    return bases["tied"]


@pytest.fixture(scope="module")
def made(base: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Named]:
    """A bf16 checkpoint with a manifest, and its master weights."""
    folder = tmp_path_factory.mktemp("run") / "checkpoint-4"
    masters = trained(folder, base, 2e-4)
    save_file({"state": torch.zeros(3)}, folder / OPTIMIZER)
    add_manifest(folder, method="kto", model_name_or_path=base)
    return folder, masters


@pytest.fixture
def giving(monkeypatch: pytest.MonkeyPatch) -> Giving:
    """Use these master weights for every checkpoint; tests/engine/test_export_runs.py reads those of real ones."""

    def give(masters: Named) -> None:
        monkeypatch.setattr(masters_module, "master_weights", lambda folder: iter(masters.items()))

    return give


def written(source: Path, out: Path, **more: Any) -> tuple[ExportReport, Named]:
    """Export, and return the report and the written tensors."""
    report = export(source, out, ExportOptions(**more))
    return report, dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())


def test_an_export_without_conversion(made: tuple[Path, Named], base: str, tmp_path: Path) -> None:
    source, out = made[0], tmp_path / "out"
    report, ours = written(source, out, max_shard_size="20KB")
    assert len(list(out.glob("*.safetensors"))) > 1
    theirs = AutoModelForCausalLM.from_pretrained(source).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(tensor.dtype == torch.bfloat16 for tensor in ours.values())
    assert (report.dtype, report.rows, report.error_max) == ("bfloat16", 8, 0)
    files = {file.name for file in out.iterdir()}
    assert {"README.md", "generation_config.json", "tokenizer.json", "chat_template.jinja", REPORT} <= files
    assert "optimizer" not in "".join(files)
    texts = (out / REPORT).read_text() + (out / "README.md").read_text()
    assert str(source.parent) not in texts and str(Path(base).parent) not in texts and Path(base).name in texts


def test_an_fp32_model_is_rounded_once(base: str, tmp_path: Path) -> None:
    masters = trained(tmp_path / "source", base, 2e-4, torch.float32)
    report, state = written(tmp_path / "source", tmp_path / "out", dtype="bfloat16", samples=4)
    assert all(torch.equal(state[name], masters[name].bfloat16()) for name in masters)
    options = ExportOptions(samples=4)
    rows = sample_rows(options, AutoTokenizer.from_pretrained(base), AutoConfig.from_pretrained(base))
    exact, rounded = (
        [mean_logp(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), row) for row in rows]
        for path in (tmp_path / "source", tmp_path / "out")
    )
    assert report.error_mean == pytest.approx(gap(exact, rounded), rel=1e-2) and report.error_mean > 0


@pytest.mark.parametrize("dtype", ["float16", "auto"])
def test_only_one_model_is_loaded_at_a_time(
    dtype: str, made: tuple[Path, Named], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loaded = export_module.load_whole, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        assert not [one for one in loaded if one() is not None]
        model = load(*args, **kwargs)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(export_module, "load_whole", watched)
    export(made[0], tmp_path / "out", ExportOptions(dtype=dtype, samples=2))
    assert len(loaded) == (2 if dtype == "auto" else 3)


def test_parameters_kept_in_fp32_are_not_rounded(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    masters = trained(tmp_path / "source", base, 2e-4, torch.float32)
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"norm"})
    export(tmp_path / "source", tmp_path / "out", ExportOptions(dtype="bfloat16", samples=0))
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(state[name], masters[name]) is name.endswith("norm.weight") for name in state)


def test_an_adapter_in_fp32_uses_its_master_weights(base: str, giving: Giving, tmp_path: Path) -> None:
    """Names may differ in training: of the adapter, and of fully saved modules."""
    model = AutoModelForCausalLM.from_pretrained(base)
    injected = moved(peft.get_peft_model(model, lora(modules_to_save=["lm_head"]), adapter_name="policy"))
    exact = logps(injected)
    trained_ones = {name: one for name, one in injected.named_parameters() if one.requires_grad}
    masters = {name.removeprefix("base_model.model."): one.detach().clone() for name, one in trained_ones.items()}
    for parameter in trained_ones.values():
        parameter.data = parameter.data.bfloat16()
    injected.save_pretrained(tmp_path / "all")
    source = tmp_path / "all" / "policy"
    export(source, tmp_path / "rounded", ExportOptions(dtype="float32", base=base, samples=0))
    save_file({"state": torch.zeros(3)}, source / OPTIMIZER)
    add_manifest(source)
    giving(masters)
    report = export(source, tmp_path / "out", ExportOptions(dtype="float32", base=base, samples=2))
    assert report.masters == len(masters) and any("modules_to_save" in name for name in masters)
    assert (logps(AutoModelForCausalLM.from_pretrained(tmp_path / "out")) - exact).abs().max() < 1e-5
    assert (logps(AutoModelForCausalLM.from_pretrained(tmp_path / "rounded")) - exact).abs().max() > 1e-4


def test_damage(made: tuple[Path, Named], tmp_path: Path) -> None:
    source, out = copied(made[0], tmp_path / "checkpoint-4"), tmp_path / "out"
    optimizer = source / OPTIMIZER
    whole = optimizer.read_bytes()
    optimizer.write_bytes(whole[:-1])
    refused(CheckpointError, str(optimizer), source, out)
    optimizer.write_bytes(whole[:-1] + b"x")
    checked_masters(source, wanted=False)
    with pytest.raises(CheckpointError, match=OPTIMIZER):
        checked_masters(source, wanted=True)
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    refused(CheckpointError, str(weights), source, out)
    (source / "manifest.json").write_text("{")
    refused(CheckpointError, "manifest.json", source, out)
    (source / "manifest.json").unlink()
    refused(CheckpointError, "manifest.json", source, out)
    refused(CheckpointError, "manifest.json", copied(source, tmp_path / "x" / ".checkpoint-8.partial", OPTIMIZER), out)


def test_master_weights_of_another_model(made: tuple[Path, Named], giving: Giving, tmp_path: Path) -> None:
    source, masters = made
    name = "model.layers.0.self_attn.q_proj.weight"
    other = masters[name].clone()
    other[3, 3] += 0.1 * other[3, 3].abs() + 0.01
    for given in ({name: other}, {name: masters[name].T[:8]}, {"model.other": other}):
        giving(given)
        refused(ModelError, f"master weight of {next(iter(given))}", source, tmp_path / "out", dtype="float32")


def test_folders_that_cannot_be_exported(made: tuple[Path, Named], base: str, tmp_path: Path) -> None:
    source, out, run = made[0], tmp_path / "out", tmp_path / "run"
    refused(ModelError, str(tmp_path / "nowhere"), tmp_path / "nowhere", out)
    for step in (4, 10):
        copied(source, run / f"checkpoint-{step}")
    refused(ModelError, "checkpoint-4, checkpoint-10", run, out)
    both = make_adapter(copied(source, tmp_path / "both"), base, lora())
    refused(ModelError, "contains an adapter and a full model", both, out)
    bare = copied(Path(base), tmp_path / "bare", "model.safetensors")
    (bare / "pytorch_model.bin").touch()
    refused(ModelError, "pickles", bare, out)


def test_models_that_cannot_be_exported(base: str, tmp_path: Path) -> None:
    plain, out = copied(Path(base), tmp_path / "plain"), tmp_path / "out"
    config, state = json.loads((plain / "config.json").read_text()), load_file(plain / "model.safetensors")

    def but(tensors: Named, **changed: Any) -> Path:
        save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
        (plain / "config.json").write_text(json.dumps(config | changed))
        return plain

    refused(ModelError, "quantized", but(state, quantization_config={"quant_method": "bitsandbytes"}), out)
    name = "model.layers.0.self_attn.q_proj.weight"
    refused(ModelError, name, but({key: value for key, value in state.items() if key != name}), out)
    large, infinite = state | {name: state[name] * 1e6}, state | {name: state[name] * torch.inf}
    refused(ModelError, f"{name} is not finite in float16", but(large), out, dtype="float16")
    refused(ModelError, f"{name} is not finite in float32", but(infinite), out)


# Folders of adapters -------------------------------------------------------------------------------------------------


def test_embeddings_of_an_adapter_replace_those_of_its_base(bases: dict[str, str], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(bases["untied"])
    resize(model, 128)
    grown = moved(peft.get_peft_model(model, lora()))
    grown.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    ours = exported(tmp_path / "adapter", tmp_path / "out")
    assert ours.config.vocab_size == 128 and (logps(ours) - logps(grown)).abs().max() < 1e-5
    options = SFTConfig("out", adapter_name_or_path=str(tmp_path / "adapter"))
    with pytest.raises(ModelError, match=r"^adapter_name_or_path: .*contains its own model.embed_tokens.* 128 rows"):
        plan_adapters(options, model_source(bases["untied"], "model", options))


def test_damaged_adapters(adapter: Path, tmp_path: Path) -> None:
    made, whole = changed(tmp_path / "adapter", adapter), (adapter / ADAPTER).read_bytes()

    def check(name: str, said: str) -> None:
        with pytest.raises(ModelError, match=f"^{made / name} {said}") as caught:
            read_adapter(made)
        assert "\n" not in str(caught.value)

    (made / ADAPTER).unlink()
    check(ADAPTER, "is missing; copy or download the adapter again")
    (made / ADAPTER).write_bytes(whole[:-1])
    check(ADAPTER, "is truncated or corrupt .*; copy or download it again")
    for tensors in ({}, {"a": torch.zeros(0, 3), "b": torch.zeros(1)}):
        save_file(tensors, made / ADAPTER)
        check(ADAPTER, "has empty tensors; .* save the adapter again")
    (made / "adapter_config.json").write_text("{")
    check("adapter_config.json", "cannot be read: .*Expecting")


def test_errors_of_libraries_during_an_export(
    bases: dict[str, str], adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise ValueError("first\nsecond")

    out, full = tmp_path / "out", Path(bases["tied"])
    refused(OptionError, f"revision: applies to the base of an adapter, but {full} is", full, out, revision="main")
    for owner, name, error, said in (
        (Linear, "merge", ModelError, "the adapter of model.layers.0.self_attn.q_proj cannot be merged: first"),
        (LlamaForCausalLM, "save_pretrained", OutputError, f"{adapter}: the model cannot be written: first"),
        (AutoTokenizer, "from_pretrained", ModelError, f"{full}: the tokenizer cannot be loaded: first"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fails)
            refused(error, said, full if owner is AutoTokenizer else adapter, out, samples=0)
