"""Small tables about exports: what a card says about a run, how an adapter was quantized, how outputs compare."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import make_model
from peft import LoraConfig, get_peft_model
from run_folders import start, write_log
from transformers import AutoModelForCausalLM, AutoTokenizer

from alignment.checkpoint.exporting.adapter import _method
from alignment.checkpoint.exporting.card import Run, _papers, _training, card_of
from alignment.checkpoint.exporting.check import OutputChange
from alignment.checkpoint.exporting.folder import load_tokenizer
from alignment.checkpoint.exporting.report import ModelReport, _json
from alignment.checkpoint.manifest import Manifest
from alignment.cli.commands import _without_local_rank
from alignment.config.errors import ModelError
from alignment.models.adapters.folder import read_adapter
from alignment.models.adapters.merging import _tie_or_tell
from alignment.models.adapters.record import TRAINING_BASE
from alignment.models.tasks import CAUSAL_LM


@pytest.mark.parametrize("with_manifest", [False, True])
def test_facts_of_a_run_are_those_of_the_checkpoint_or_else_of_the_log(with_manifest: bool, tmp_path: Path) -> None:
    write_log(tmp_path, [start()])
    manifest = Manifest("r", 3, "kto", 4, 2, 16, 50, True, {}, {}, {}, {}) if with_manifest else None
    found = dict(_training(Run(tmp_path, manifest, given={"adapter_name_or_path": "a"})))
    facts = {"planned steps": "50", "rows per step": "16", "processes": "4", "ZeRO stage": "2"}
    logged = {"planned steps": "100", "rows per step": "8", "processes": "2"}
    assert {name: text for name, text in found.items() if name in facts} == (facts if with_manifest else logged)
    assert found["initial adapter"] == "a"


@pytest.mark.parametrize(
    ("is_classifier", "said"),
    [(True, ("pipeline_tag: text-classification", "reward model")), (False, ("pipeline_tag: text-generation",))],
)
def test_a_card_names_its_kind_of_model(is_classifier: bool, said: tuple[str, ...], tmp_path: Path) -> None:
    write_log(tmp_path, [start()])
    text = card_of(Run(tmp_path), title="T", is_classifier=is_classifier, base="b", export=["e"]).text()
    assert all(part in text for part in said) and ("reward model" in text) == is_classifier


def test_papers_of_a_loss() -> None:
    papers = {"": ("method", "m"), "ipo": ("loss", "l")}
    assert [_papers(papers, loss) for loss in ("ipo", "kto", None, ["ipo"])] == [
        [("method", "m"), ("loss", "l")], [("method", "m")], [("method", "m")], [("method", "m")],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("in_config", "in_folder", "said"),
    [
        (None, None, None),
        ({"load_in_4bit": True}, None, "4 bits, fp4"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"load_in_8bit": True}, "4 bits, nf4"),
        (None, {"load_in_8bit": True}, "8 bits"),
    ],
)
def test_the_quantization_that_an_adapter_was_trained_on(in_config: Any, in_folder: Any, said: str | None) -> None:
    for given in (in_config, None if in_config is None else SimpleNamespace(to_dict=lambda: in_config)):
        config: Any = SimpleNamespace(quantization_config=given)
        folder: Any = SimpleNamespace(quantization=in_folder)
        assert _method(folder, config) == said


@pytest.mark.parametrize(
    ("error", "effect", "share"),
    [(0.0, None, None), (1.0, None, None), (0.0, 0.0, 0.0), (1.0, 0.0, float("inf")), (1.0, 4.0, 0.25), (0.0, 4.0, 0)],
)  # fmt: skip
def test_an_error_relative_to_the_effect_of_training(error: float, effect: float | None, share: float | None) -> None:
    assert OutputChange("score", "rows", 2, error, error, effect).share == share


@pytest.mark.parametrize(
    "given",
    [["--local_rank=1"], ["--local_rank", "1"], ["--local-rank=1"], ["--local-rank", "0"], ["--local_rank=1"] * 2, []],
)
def test_the_local_rank_before_a_command(given: list[str]) -> None:
    assert _without_local_rank([*given, "train", "x", "--local_rank=2"]) == ["train", "x", "--local_rank=2"]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(make_model(folder / "base"))
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder / "adapter")
    return folder / "adapter"


@pytest.mark.parametrize(
    ("recorded", "base", "found"),
    [
        (None, None, ("BASE", None)),
        (None, "mine", ("mine", None)),
        ({"base_model": "theirs", "revision": "r"}, None, ("theirs", "r")),
        ({"base_model": "theirs", "revision": "r"}, "mine", ("mine", None)),
        ({"base_model": "theirs", "merged": True}, "mine", ("mine", None)),
        ({"base_model": "theirs", "merged": True}, None, None),
        ({"task": "no such task"}, None, None),
        ([], None, None),
    ],
)
def test_the_base_of_an_adapter(recorded: Any, base: str | None, found: Any, adapter: Path) -> None:
    """That of the call, else what the run has recorded, else PEFT's."""
    record = adapter / TRAINING_BASE
    record.unlink(missing_ok=True)
    if recorded is not None:
        record.write_text(json.dumps(recorded))
    if found is None:
        with pytest.raises(ModelError, match=f"^{adapter}"):
            read_adapter(adapter, base)
        return
    read = read_adapter(adapter, base)
    assert (read.base.replace(str(adapter.parent / "base"), "BASE"), read.revision) == found
    assert read_adapter(adapter, base, "asked").revision == "asked" and read.task is CAUSAL_LM


@pytest.mark.parametrize(
    ("was_tied", "equal", "tied"), [(True, True, True), (True, False, False), (False, True, False), (True, None, True)]
)
def test_ends_of_a_model_are_tied_again_if_they_are_equal(was_tied: bool, equal: bool | None, tied: bool) -> None:
    """``None``: a model without a head."""
    embedding, head = torch.nn.Embedding(3, 2), None if equal is None else torch.nn.Linear(2, 3, bias=False)
    if head is not None:
        head.weight.data.copy_(embedding.weight.data + (0 if equal else 1))
    config = SimpleNamespace(tie_word_embeddings=was_tied, get_text_config=lambda: config)
    model: Any = SimpleNamespace(
        config=config, get_input_embeddings=lambda: embedding, get_output_embeddings=lambda: head
    )
    _tie_or_tell(model, was_tied)
    assert config.tie_word_embeddings == tied
    assert head is None or (head.weight is embedding.weight) == tied


@pytest.mark.parametrize("trusted", [True, False])
def test_code_of_a_tokenizer_is_trusted_only_if_requested(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda where, **options: given.append((where, options)))
    load_tokenizer("owner/name", "main", trusted, needed=True)
    assert given == [("owner/name", {"revision": "main", "trust_remote_code": trusted})]


@pytest.mark.parametrize("base", ["/home/me/models/base", "owner/base", None])
def test_a_published_report_names_the_base_model_without_its_folder(base: str | None) -> None:
    report = ModelReport("checkpoint-4", base, "causal_lm", "bfloat16", "bfloat16", 0, None, None, None, None, None)
    shown = None if base is None else base.removeprefix("/home/me/models/")
    assert json.loads(_json(report))["base_model"] == shown
