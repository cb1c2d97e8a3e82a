"""Export of full models: correct tensors, master weights, detection of damage, and what is refused."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.exports import gap, mean_logp, refused
from support.helpers import make_model
from support.tiny_adapters import logps, lora, make_adapter, moved
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from alignment.checkpoint import export as export_module
from alignment.checkpoint import masters as masters_module
from alignment.checkpoint.comparison import sample_rows
from alignment.checkpoint.export import ExportReport, export
from alignment.checkpoint.manifest import Manifest, files_in, record_of
from alignment.checkpoint.masters import checked_masters
from alignment.checkpoint.run_folder import REPORT
from alignment.config.errors import CheckpointError, ModelError
from alignment.config.options_export import ExportOptions

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
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("base"), "tied")


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


def copied(source: Path, folder: Path, *without: str) -> Path:
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.name not in without:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


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


def test_an_fp32_export_uses_the_master_weights(made: tuple[Path, Named], giving: Giving, tmp_path: Path) -> None:
    source, masters = made
    giving(masters)
    report, state = written(source, tmp_path / "out", dtype="float32", samples=2)
    assert all(torch.equal(state[name], masters[name]) for name in masters) and report.masters == len(masters)
    assert report.error_max is not None and report.error_max < 1e-6
    assert "fp32 master weights" in "\n".join(report.lines())


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
    copied(source, run / "checkpoint-4")
    refused(ModelError, "checkpoint-4", run, out)
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
