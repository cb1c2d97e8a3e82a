"""Export of full models: correct tensors, detection of damage, and correct reports."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from exports import FOUR_BITS, command, gap, mean_logp
from helpers import make_classifier, make_model
from safetensors.torch import load_file, save_file
from tiny_adapters import logps, lora, make_adapter, moved
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from alignment.checkpoint.exporting import model as model_module
from alignment.checkpoint.exporting import source as source_module
from alignment.checkpoint.exporting.check import default_samples
from alignment.checkpoint.exporting.export import export
from alignment.checkpoint.exporting.folder import REPORT
from alignment.checkpoint.exporting.model import export_model
from alignment.checkpoint.exporting.source import check_manifest, is_adapter
from alignment.checkpoint.manifest import Manifest, files_in, record_of
from alignment.config.errors import AlignmentError, CheckpointError, OptionError

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
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("base"), "tied")


@pytest.fixture(scope="module")
def made(base: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Named]:
    """A bf16 checkpoint with a manifest, and its master weights."""
    folder = tmp_path_factory.mktemp("run") / "checkpoint-4"
    masters = trained(folder, base, 2e-4)
    save_file({"state": torch.zeros(3)}, folder / "optimizer-00001-of-00001.safetensors")
    add_manifest(folder, method="kto", model_name_or_path=base)
    return folder, masters


@pytest.fixture
def giving(monkeypatch: pytest.MonkeyPatch) -> Callable[[Named], None]:
    """Use these master weights for every checkpoint; tests/engine/test_export_runs.py reads those of real ones."""

    def give(masters: Named) -> None:
        monkeypatch.setattr(source_module, "master_weights", lambda folder: iter(masters.items()))

    return give


# Written files -------------------------------------------------------------------------------------------------------


def test_an_export_without_conversion(made: tuple[Path, Named], tmp_path: Path) -> None:
    source, _ = made
    report = export(source, tmp_path / "out", max_shard_size="20KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    ours, theirs = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tmp_path / "out", source))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(tensor.dtype == torch.bfloat16 for tensor in ours.values())
    assert report.change is not None and report.change.error_max == 0 and report.survival is None
    assert {"README.md", "generation_config.json", "tokenizer.json", "chat_template.jinja", REPORT} <= {
        file.name for file in (tmp_path / "out").iterdir()
    }
    assert "optimizer" not in "".join(file.name for file in (tmp_path / "out").iterdir())
    stored = (tmp_path / "out" / REPORT).read_text() + (tmp_path / "out" / "README.md").read_text()
    assert str(source.parent) not in stored and str(Path(report.base_model or "none").parent) not in stored


def test_an_fp32_export_uses_the_master_weights(
    made: tuple[Path, Named], base: str, giving: Callable[[Named], None], tmp_path: Path
) -> None:
    source, masters = made
    giving(masters)
    report = export_model(source, tmp_path / "out", dtype="float32", sample_count=4)
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(state[name], masters[name]) for name in masters) and report.masters == len(masters)
    # expected: the model before training, the 16-bit model of the files, and the fp32 model
    rows = default_samples(AutoTokenizer.from_pretrained(base), 77, 4).rows
    before, stored, exact = (
        [mean_logp(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), list(row)) for row in rows]
        for path in (base, source, tmp_path / "out")
    )
    assert report.change is not None and report.change.error_max < 1e-6
    assert report.change.effect_mean == pytest.approx(gap(exact, before), rel=1e-3)
    assert report.stored_change is not None
    assert report.stored_change.error_mean == pytest.approx(gap(exact, stored), rel=1e-2)
    # the part of the update that is in the 16-bit files
    start = load_file(Path(base) / "model.safetensors")
    u = torch.cat([(masters[name] - start[name]).flatten().double() for name in start])
    v = torch.cat([(masters[name].bfloat16().float() - start[name].bfloat16().float()).flatten() for name in start])
    assert report.survival is not None and report.survival.cosine < 0.9
    assert report.survival.cosine == pytest.approx(float(u @ v.double() / u.norm() / v.double().norm()), rel=1e-4)
    assert "fp32 master weights of" in "\n".join(report.lines())


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.ci)])
def test_an_fp32_model_is_rounded_once(dtype: str, base: str, tmp_path: Path) -> None:
    masters = trained(tmp_path / "source", base, 2e-4, torch.float32)
    report = export_model(tmp_path / "source", tmp_path / "out", dtype=dtype, base=base, sample_count=4)
    state, kind = load_file(tmp_path / "out" / "model.safetensors"), getattr(torch, dtype)
    assert all(torch.equal(state[name], masters[name].to(kind)) for name in masters)
    rows = default_samples(AutoTokenizer.from_pretrained(base), 77, 4).rows
    exact, rounded = (
        [mean_logp(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), list(row)) for row in rows]
        for path in (tmp_path / "source", tmp_path / "out")
    )
    assert report.change is not None and report.survival is not None and report.stored_change is None
    assert report.change.error_mean == pytest.approx(gap(exact, rounded), rel=1e-2)
    assert report.survival.cosine < 0.9 if dtype == "bfloat16" else 0.98 < report.survival.cosine < 1
    assert (report.advice is not None) is (dtype == "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.ci), "float32"])
def test_only_one_model_is_loaded_at_a_time(
    dtype: str, made: tuple[Path, Named], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loaded = model_module.load_whole, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        assert not [one for one in loaded if one() is not None]
        model = load(*args, **kwargs)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(model_module, "load_whole", watched)
    source = copied(made[0], tmp_path / "checkpoint-4", "manifest.json", "optimizer-00001-of-00001.safetensors")
    export_model(source, tmp_path / "out", dtype=dtype, base=str(made[0]), sample_count=2)
    assert len(loaded) == (4 if dtype == "float16" else 3)


@pytest.mark.ci
def test_experts_in_fp32_use_their_master_weights(giving: Callable[[Named], None], tmp_path: Path) -> None:
    """Files have one tensor per expert, the training model has one for all experts."""
    masters = trained(tmp_path / "checkpoint-4", make_model(tmp_path / "moe", "moe"), 2e-4)
    save_file({"state": torch.zeros(3)}, tmp_path / "checkpoint-4" / "optimizer-00001-of-00001.safetensors")
    add_manifest(tmp_path / "checkpoint-4")
    giving(masters)
    report = export_model(tmp_path / "checkpoint-4", tmp_path / "out", dtype="float32", sample_count=2)
    state = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert report.masters == len(masters) and all(torch.equal(state[name], masters[name]) for name in masters)
    assert any(tensor.ndim == 3 for tensor in masters.values())


def test_fp32_without_master_weights_is_reported(made: tuple[Path, Named], tmp_path: Path) -> None:
    """For example, a checkpoint with the model only."""
    whole, masters = made
    source = copied(whole, tmp_path / "checkpoint-4", "manifest.json", "optimizer-00001-of-00001.safetensors")
    report = export_model(source, tmp_path / "out", dtype="float32", sample_count=0)
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(state[name], masters[name].bfloat16().float()) for name in masters)
    assert report.change is None and "float32 has no advantage over bfloat16 here" in "\n".join(report.lines())


def test_parameters_kept_in_fp32_are_not_rounded(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "moe", "moe")
    ours = export_model(Path(folder), tmp_path / "out", dtype="bfloat16", sample_count=1)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(state[name], theirs[name]) for name in theirs) and ours.change is not None
    assert ours.change.error_mean > 0 and ours.base_model is None and ours.change.share is None


def test_the_dtype_of_mixed_files_is_the_most_frequent_one(made: tuple[Path, Named], tmp_path: Path) -> None:
    source = copied(made[0], tmp_path / "source", "manifest.json", "optimizer-00001-of-00001.safetensors")
    state = load_file(source / "model.safetensors")
    norm = "model.norm.weight"
    save_file(state | {norm: state[norm].float()}, source / "model.safetensors", metadata={"format": "pt"})
    report = export_model(source, tmp_path / "out", sample_count=0)
    assert report.stored == report.dtype == "bfloat16"


def test_a_reward_model_is_compared_by_its_scores(base: str, tmp_path: Path) -> None:
    source = Path(make_classifier(tmp_path / "source"))
    report = export_model(source, tmp_path / "out", dtype="bfloat16", base=base)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    wide = AutoModelForSequenceClassification.from_pretrained(source)
    assert torch.equal(model.score.weight, wide.score.weight.bfloat16()) and model.config.num_labels == 1
    assert report.task == "classifier" and report.change is not None and report.change.what == "score"
    assert report.change.error_mean > 0 and report.change.effect_mean is None  # the base model has no score
    assert "text-classification" in (tmp_path / "out" / "README.md").read_text()
    assert not (tmp_path / "out" / "generation_config.json").exists()


def test_an_adapter_in_fp32_uses_its_master_weights(
    base: str, giving: Callable[[Named], None], tmp_path: Path
) -> None:
    """Names may differ in training: of the adapter, and of fully saved modules."""
    model = AutoModelForCausalLM.from_pretrained(base)
    injected = moved(peft.get_peft_model(model, lora(modules_to_save=["lm_head"]), adapter_name="policy"))
    exact = logps(injected)
    masters = {
        name.removeprefix("base_model.model."): parameter.detach().clone()
        for name, parameter in injected.named_parameters()
        if parameter.requires_grad
    }
    for parameter in injected.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    injected.save_pretrained(tmp_path / "all")
    source = tmp_path / "all" / "policy"
    export(source, tmp_path / "rounded", dtype="float32", base=base, sample_count=0)
    save_file({"state": torch.zeros(3)}, source / "optimizer-00001-of-00001.safetensors")
    add_manifest(source)
    giving(masters)
    report = export(source, tmp_path / "out", dtype="float32", base=base, sample_count=2)
    assert report.masters == len(masters) and any("modules_to_save" in name for name in masters)
    assert (logps(AutoModelForCausalLM.from_pretrained(tmp_path / "out")) - exact).abs().max() < 1e-5
    assert (logps(AutoModelForCausalLM.from_pretrained(tmp_path / "rounded")) - exact).abs().max() > 1e-4


# Refused -------------------------------------------------------------------------------------------------------------


def refused(source: Path, out: Path, **more: Any) -> str:
    with pytest.raises(AlignmentError) as caught:
        export(source, out, **more)
    assert "\n" not in str(caught.value) and not out.exists() and not list(out.parent.glob(".*"))
    return str(caught.value)


def copied(source: Path, folder: Path, *without: str) -> Path:
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.name not in without:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_damage(made: tuple[Path, Named], tmp_path: Path) -> None:
    source = copied(made[0], tmp_path / "checkpoint-4")
    out, optimizer = tmp_path / "out", source / "optimizer-00001-of-00001.safetensors"
    names = [file.name for file in source.iterdir() if file.name not in ("manifest.json", optimizer.name)]
    assert len(names) > 4
    for name in names:
        whole = (source / name).read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) - 3] ^= 4
        (source / name).write_bytes(flipped)
        with pytest.raises(CheckpointError, match=name):
            check_manifest(source)
        (source / name).write_bytes(whole[:-1])
        with pytest.raises(CheckpointError, match=name):
            check_manifest(source)
        (source / name).unlink()
        with pytest.raises(CheckpointError, match=f"{name}: missing"):
            check_manifest(source)
        (source / name).write_bytes(whole)
    optimizer.write_bytes(optimizer.read_bytes()[:-1] + b"x")
    check_manifest(source)
    assert f"{optimizer}: the content has changed since it was written" in refused(source, out, dtype="float32")
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert f"{weights}: the content has changed since it was written" in refused(source, out)
    (source / "manifest.json").write_text("{")
    assert "manifest.json: cannot be read" in refused(source, out)
    (source / "manifest.json").unlink()
    assert "manifest.json is missing, so the checkpoint is not complete" in refused(source, out)


def test_an_adapter_of_a_damaged_checkpoint(base: str, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "checkpoint-4", base, lora())
    add_manifest(adapter)
    (adapter / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text().replace("4", "5", 1))
    assert "adapter_config.json: the content has changed since it was written" in refused(adapter, tmp_path / "out")


def test_master_weights_of_another_model(
    made: tuple[Path, Named], giving: Callable[[Named], None], tmp_path: Path
) -> None:
    source, masters = made
    out, name = tmp_path / "out", "model.layers.0.self_attn.q_proj.weight"
    other = masters[name].clone()
    other[3, 3] += 0.1 * other[3, 3].abs() + 0.01
    giving({name: other})
    text = refused(source, out, dtype="float32")
    assert f"master weight of {name}" in text and "damaged or from another step" in text
    giving({name: masters[name].T[:8]})
    assert "master weight" in refused(source, out, dtype="float32")
    giving({"model.other": other})
    assert "no such parameter" in refused(source, out, dtype="float32")


def test_folders_that_cannot_be_exported(made: tuple[Path, Named], base: str, tmp_path: Path) -> None:
    source, out = made[0], tmp_path / "out"
    assert "no such folder" in refused(tmp_path / "nowhere", out)
    (tmp_path / "file").touch()
    assert "is a file" in refused(tmp_path / "file", out)
    run = tmp_path / "run"
    copied(source, run / "checkpoint-4")
    copied(source, run / ".checkpoint-8.partial")
    assert "pass one of those in it: checkpoint-4" in refused(run, out)
    assert "unfinished checkpoint" in refused(run / ".checkpoint-8.partial", out)
    both = make_adapter(copied(source, tmp_path / "both"), base, lora())
    assert "contains an adapter (adapter_config.json) and a full model" in refused(both, out)
    engine = tmp_path / "engine" / "global_step4"
    engine.mkdir(parents=True)
    (engine / "mp_rank_00_model_states.pt").touch()
    assert "DeepSpeed's format" in refused(engine, out) and "DeepSpeed's format" in refused(engine.parent, out)
    bare = copied(source, tmp_path / "bare", "model.safetensors")
    assert "no weights (model.safetensors)" in refused(bare, out)
    (bare / "pytorch_model.bin").touch()
    assert "pickle" in refused(bare, out)
    (tmp_path / "empty").mkdir()
    assert "neither a model" in refused(tmp_path / "empty", out)
    (run / "zero_to_fp32.py").touch()
    assert not is_adapter(copied(source, run / "checkpoint-5"))


def test_models_that_cannot_be_exported(made: tuple[Path, Named], base: str, tmp_path: Path) -> None:
    plain, out = copied(Path(base), tmp_path / "plain"), tmp_path / "out"
    config, state = json.loads((plain / "config.json").read_text()), load_file(plain / "model.safetensors")

    def but(tensors: Named, **changed: Any) -> Path:
        save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
        (plain / "config.json").write_text(json.dumps(config | changed))
        return plain

    quantized = {"quant_method": "bitsandbytes", **FOUR_BITS}
    assert "the weights are quantized" in refused(but(state, quantization_config=quantized), out)
    labels = {str(number): "abc"[number] for number in range(3)}
    assert "num_labels=3" in refused(
        but(state, architectures=["LlamaForSequenceClassification"], id2label=labels), out
    )
    assert "encoder-decoder" in refused(but(state, model_type="t5"), out)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert f"do not contain {name}" in refused(but({key: value for key, value in state.items() if key != name}), out)
    assert f"{name} does not fit float16" in refused(but(state | {name: state[name] * 1e6}), out, dtype="float16")
    assert f"{name} is not finite" in refused(but(state | {name: state[name] * torch.inf}), out)
    assert "the weights are F64" in refused(but({key: value.double() for key, value in state.items()}), out)
    file = plain / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    assert "model.safetensors is damaged" in refused(plain, out)
    index = {"weight_map": {name: "model-00001-of-00002.safetensors"}}
    file.unlink()
    (plain / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors is missing" in refused(plain, out)


@pytest.mark.parametrize("size", ["five", "0GB", "-1MB", "5", "GB", "5XB", "0.0001KB", ""])
def test_invalid_shard_sizes(size: str, made: tuple[Path, Named], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="expected a size such as 5GB"):
        export(made[0], tmp_path / "out", max_shard_size=size)


def test_a_missing_base_model(made: tuple[Path, Named], tmp_path: Path) -> None:
    source = copied(made[0], tmp_path / "checkpoint-4")
    told: list[str] = []
    for place, line in (("gone", None), ("broken", "the effect of training is not measured")):
        if line:
            (tmp_path / place).mkdir()
        (source / "manifest.json").unlink()
        add_manifest(source, model_name_or_path=str(tmp_path / place))
        report = export_model(source, tmp_path / f"out-{place}", sample_count=2, tell=told.append)
        assert report.change is not None and report.change.share is None
        assert any(line in one for one in told) if line else not any("not measured" in one for one in told)
    assert "/nowhere" in refused(source, tmp_path / "out", base="/nowhere")


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command(made: tuple[Path, Named], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = str(made[0]), tmp_path / "out"
    code, printed, err = command(capsys, source, str(out), "--dtype", "float16", "--samples", "2")
    assert (code, err) == (0, "") and "exported in float16: the bfloat16 weights of the model files" in printed
    assert "log-prob per token on 2 rows (built-in texts): the reloaded export differs from its source" in printed
    assert f"model, tokenizer, README.md and export_report.json: {out}" in printed
    for arguments, message in (
        (["--max_shard_size", "big"], "max_shard_size='big'"),
        (["--load_in_4bit"], "load_in_4bit: "),
        (["--samples", "-1"], "samples=-1"),
    ):
        code, printed, err = command(capsys, source, str(tmp_path / "other"), *arguments)
        assert (code, printed) == (1, "") and err.startswith("error: ") and message in err and err.count("\n") == 1
    assert not (tmp_path / "other").exists()
