"""Small tables about exports: the base of an adapter, tied embeddings, trust in a tokenizer's code."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import make_model
from tiny_adapters import lora, make_adapter
from transformers import AutoTokenizer

from alignment.checkpoint.export import _tokenizer
from alignment.cli.commands import _without_local_rank
from alignment.config.errors import ModelError
from alignment.models.adapters.folder import read_adapter, write_training_base
from alignment.models.adapters.merging import _tie_or_tell
from alignment.models.adapters.record import TRAINING_BASE
from alignment.models.tasks import CAUSAL_LM, REWARD_MODEL


@pytest.mark.parametrize(
    "given",
    [["--local_rank=1"], ["--local_rank", "1"], ["--local-rank=1"], ["--local-rank", "0"], ["--local_rank=1"] * 2, []],
)
def test_the_local_rank_before_a_command(given: list[str]) -> None:
    assert _without_local_rank([*given, "train", "x", "--local_rank=2"]) == ["train", "x", "--local_rank=2"]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    return make_adapter(folder / "adapter", make_model(folder / "base"), lora(r=2))


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


def test_the_record_written_by_training(adapter: Path) -> None:
    quantization = {"load_in_8bit": True}
    write_training_base(adapter, base_model="a/b", revision="r", quantization=quantization, task=REWARD_MODEL)
    seen = read_adapter(adapter)
    assert (seen.base, seen.revision, seen.quantization, seen.task) == ("a/b", "r", quantization, REWARD_MODEL)


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
    _tokenizer("owner/name", "main", trusted)
    assert given == [("owner/name", {"revision": "main", "trust_remote_code": trusted})]
