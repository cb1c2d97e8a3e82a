"""Small tables about models: which weights are sampled, what is quantized, tokens at the end, damaged files."""

from __future__ import annotations

import contextlib
import functools
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.helpers import make_model, options
from torch import nn
from transformers import GenerationConfig

import alignment
from alignment.checkpoint import best, fingerprints
from alignment.checkpoint.best import BestModel
from alignment.checkpoint.run_folder import holds_model
from alignment.config.errors import CheckpointError, ModelError, OptionError
from alignment.models.loading import _begin_anew
from alignment.models.source import check_weights, model_source
from alignment.models.vocabulary import Vocabulary, rounded_up
from alignment.planning import engines


@given(size=st.one_of(st.integers(0, 140), st.integers(1000, 2000)))
def test_samples_of_a_weight_file_include_both_ends(size: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Up to the size of all pieces together, they include every byte."""
    file = tmp_path_factory.getbasetemp() / "weights"
    content = bytes(number % 251 for number in range(size))
    file.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprints, "_PIECE", 8)
        pieces = list(fingerprints._pieces(file))
    assert len(pieces) == 16 and pieces[0] == content[:8] and pieces[-1] == content[-8:]
    assert size > 16 * 8 or len({*content} - {*b"".join(pieces)}) == 0
    assert all(len(piece) == min(8, size) for piece in pieces)


@pytest.mark.parametrize(
    ("eos", "before", "after"),
    [(None, 1, 1), (7, None, 7), (7, 7, 7), (7, 1, [7, 1]), (7, [1, 7, 2], [7, 1, 2]), (7, [7], 7), (0, 1, [0, 1])],
)
def test_a_new_token_ends_generations_too(eos: int | None, before: Any, after: Any) -> None:
    config = SimpleNamespace(eos_token_id=5, get_text_config=lambda: config)
    for generation in (GenerationConfig(eos_token_id=before), None):
        config.eos_token_id = 5
        model: Any = SimpleNamespace(config=config, generation_config=generation)
        Vocabulary(eos=eos).put_on(model)
        assert config.eos_token_id == (5 if eos is None else eos)
        assert generation is None or generation.eos_token_id == after


@pytest.mark.parametrize(
    ("tokens", "multiple", "rows"), [(1, 64, 64), (64, 64, 64), (65, 64, 128), (65, None, 65), (0, 64, 0)]
)
def test_rows_of_an_embedding(tokens: int, multiple: int | None, rows: int) -> None:
    assert rounded_up(tokens, multiple) == rows


@pytest.mark.parametrize(
    ("content", "torn"), [(b"", True), (b"P", False), (b"PK\3\4", True), (b"\x80\2", False), (None, False)]
)
def test_damaged_weights_are_named_with_the_option(content: bytes | None, torn: bool, tmp_path: Path) -> None:
    """torch's older format cannot be checked without reading it."""
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as file:
        file.writestr("a", "b")
    if content is not None:
        (tmp_path / "pytorch_model.bin").write_bytes(content)
    if not torn:
        check_weights(tmp_path, "ref_model")
        return
    with pytest.raises(ModelError, match="^ref_model: .*pytorch_model.bin"):
        check_weights(tmp_path, "ref_model")


@pytest.mark.parametrize(("config", "deviation"), [({"initializer_range": 3.0}, 3.0), ({}, 0.02)])
def test_new_weights_are_those_of_the_seed(config: dict[str, float], deviation: float) -> None:
    text = SimpleNamespace(**config)
    found = []
    for seed in (1, 1, 2):
        model: Any = nn.Linear(100, 100)
        model.config = SimpleNamespace(get_text_config=lambda: text)
        _begin_anew(model, ["weight"], seed)
        found.append(model.weight.detach())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert float(found[0].std()) == pytest.approx(deviation, rel=0.05) and abs(float(found[0].mean())) < deviation / 20


@pytest.mark.parametrize(
    ("policy", "reference", "bits"),
    [
        ({}, None, None), ({}, True, 4), ({"load_in_4bit": True}, None, 4), ({"load_in_8bit": True}, None, 8),
        ({"load_in_4bit": True}, False, None), ({"load_in_8bit": True}, False, None),
        ({"load_in_8bit": True}, True, 4),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("own_process_group")
def test_a_reference_is_quantized_like_the_policy_unless_set(
    policy: dict[str, Any], reference: bool | None, bits: int | None, tmp_path: Path
) -> None:
    adapters = {"use_peft": True, "ref_placement": "replica"} if policy else {}
    args = alignment.KTOConfig(
        **options(tmp_path, deepspeed="zero2", ref_load_in_4bit=reference, **adapters, **policy)
    )
    model = model_source(make_model(tmp_path / "model"), "model_name_or_path", args)
    planned = engines.plan_engines(args, model, model).reference
    found = planned.source.quantization  # type: ignore[union-attr]
    assert (None if found is None else found.bits) == bits


@pytest.mark.parametrize(("deepspeed", "refused"), [("zero2", False), ("zero3", True)])
@pytest.mark.usefixtures("own_process_group")
def test_adapters_are_checked_for_the_stage_of_the_engine(deepspeed: str, refused: bool, tmp_path: Path) -> None:
    args = alignment.KTOConfig(
        **options(tmp_path, deepspeed=deepspeed, use_peft=True, use_dora=True, load_in_4bit=True)
    )
    model = model_source(make_model(tmp_path / "model"), "model_name_or_path", args)
    with pytest.raises(OptionError, match="^use_dora=True") if refused else contextlib.nullcontext():
        engines.plan_engines(args, model, None)


@pytest.mark.parametrize(("needed", "damage", "kept"), [(True, True, False), (True, False, True), (False, True, True)])
def test_a_damaged_best_checkpoint_is_dropped_if_it_is_needed(
    needed: bool, damage: bool, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(folder: Path) -> Any:
        assert folder == tmp_path / "checkpoint-3"
        if damage:
            raise CheckpointError("torn")
        return SimpleNamespace(check_files=lambda folder: None)

    monkeypatch.setattr(best, "on_first_rank", lambda call: call())
    monkeypatch.setattr(best.Manifest, "read", read)
    args = alignment.CPOConfig("out", eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=needed)
    state: Any = SimpleNamespace(best_metric=0.5, best_global_step=3, best_model_checkpoint="elsewhere/checkpoint-3")
    said = BestModel(args, state).moved_to(tmp_path)
    assert (said is None) == kept and (state.best_metric, state.best_global_step) == (
        (0.5, 3) if kept else (None,) * 2
    )
    assert state.best_model_checkpoint == (str(tmp_path / "checkpoint-3") if kept else None)
    state.best_model_checkpoint = None
    assert BestModel(args, state).moved_to(tmp_path) is None


def test_fingerprints_of_code_with_and_without_a_source() -> None:
    class Judge:
        identity = {"model": "a"}

    def reward() -> None:
        """A function with a source."""

    assert fingerprints.code_fingerprint(len) == "len"
    assert fingerprints.code_fingerprint(functools.partial(functools.partial(len), 1)) == "len"
    name, _, digest = fingerprints.code_fingerprint(reward).partition(" ")
    assert name.endswith("reward") and len(digest) == 16
    judges = [fingerprints.code_fingerprint(SimpleNamespace(identity={"model": model})) for model in "ab"]
    assert judges[0].split()[0] == "SimpleNamespace" and judges[0] != judges[1]
    assert fingerprints.code_fingerprint(Judge()).split()[1] == judges[0].split()[1]


@pytest.mark.parametrize(
    ("name", "holds"),
    [("model.safetensors", True), ("model-00001-of-00002.safetensors", True), ("adapter_model.safetensors", True),
     ("pytorch_model.bin", True), ("optimizer.safetensors", False), ("config.json", False)],
)  # fmt: skip
def test_whether_a_folder_holds_a_model(name: str, holds: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    assert holds_model(tmp_path) == holds
