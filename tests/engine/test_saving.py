"""Atomic saves of a model: other files in the folder are kept, and failures leave nothing behind."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DRIVERS
from support.data_tokenizers import PLAIN, char_tokenizer
from support.helpers import make_model, tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from alignment.checkpoint.saving import gathered_state_dict, write_model
from alignment.config.errors import OutputError
from alignment.models.head import LogProbHead
from alignment.models.scorer import CompletionScorer
from tools.ranks import RankServer


def small(kind: str = "tied") -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(kind))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["tied", "untied", "capped", "scaled", "moe"])
def test_a_saved_model_loads(tmp_path: Path, kind: str) -> None:
    model = small(kind)
    CompletionScorer(model)
    assert isinstance(model.get_output_embeddings(), LogProbHead)
    write_model(model, char_tokenizer(template=PLAIN), tmp_path / "a" / "out", first_rank=True)
    assert names(tmp_path / "a") == {"out"}
    back, info = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(back.lm_head) is torch.nn.Linear
    ids = torch.arange(12)[None]
    assert torch.equal(back.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    tied = back.lm_head.weight is back.model.embed_tokens.weight
    assert tied == (kind in ("tied", "capped", "scaled")), "a tied head stays tied, an untied one untied"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a" / "out")
    assert tokenizer("abc").input_ids == char_tokenizer()("abc").input_ids and tokenizer.chat_template == PLAIN


def test_state_dict_is_a_copy_with_persistent_buffers(tmp_path: Path) -> None:
    model = small()
    model.register_buffer("kept", torch.ones(3))
    model.register_buffer("left_out", torch.ones(3), persistent=False)
    state = gathered_state_dict(model, keep=True)
    assert state.keys() == model.state_dict().keys() - {"lm_head.weight"}
    assert state["kept"].tolist() == [1, 1, 1]
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(1)
    assert state["kept"].tolist() == [1, 1, 1]
    assert not torch.equal(state["model.norm.weight"], model.model.norm.weight)
    assert gathered_state_dict(model, keep=False) == {}
    write_model(model, None, tmp_path / "out", first_rank=False)
    assert names(tmp_path) == set()


def test_an_existing_folder_keeps_its_other_files(tmp_path: Path) -> None:
    out = Path(make_model(tmp_path / "out", "untied"))
    (out / "log.jsonl").write_text("{}\n")
    (out / "checkpoint-1").mkdir()
    (out / "checkpoint-1" / "model.safetensors").write_text("other")
    before, stale = names(out), {"model-00001-of-00002.safetensors", "model.safetensors.index.json"}
    for name in stale:
        (out / name).write_text("{}")
    (out / "config.json").unlink()
    (out / "config.json" / "folder").mkdir(parents=True)
    model = small()
    write_model(model, None, out, first_rank=True)
    assert names(out) == before
    assert (out / "log.jsonl").read_text() == "{}\n"
    assert (out / "checkpoint-1" / "model.safetensors").read_text() == "other"
    back = AutoModelForCausalLM.from_pretrained(out)
    assert all(torch.equal(v, model.state_dict()[n]) for n, v in back.state_dict().items())
    assert names(tmp_path) == {"out"}


def test_files_are_moved_only_within_an_existing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output folder may be a mount point: only its contents are on the same disk, or writable."""
    out, moved, replace = tmp_path / "out", [], os.replace
    out.mkdir()
    monkeypatch.setattr("os.replace", lambda source, to: moved.append((source, to)) or replace(source, to))
    write_model(small(), None, out, first_rank=True)
    assert moved and all(out in source.parents and out in target.parents for source, target in moved)


@pytest.mark.parametrize("existing", [None, "folder", "file"])
def test_an_error_while_saving_leaves_nothing_behind(existing: str | None, tmp_path: Path) -> None:
    """A limit on the size of files simulates a full disk; a file in place of the folder is not replaced."""
    out = tmp_path / "out"
    if existing == "folder":
        make_model(out)
    elif existing == "file":
        out.write_text("precious")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OutputError, match=f"^output_dir: .*{out}"):
            write_model(small(), None, out, first_rank=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == ({"out"} if existing else set())
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.ci
def test_two_ranks_and_their_folder(ranks: RankServer, tmp_path: Path) -> None:
    """Writing a checkpoint together requires one shared folder, and a barrier at which the host waits."""
    done = ranks.run(DRIVERS / "shared_folder.py", tmp_path, timeout=60)
    found = [json.loads(rank.stdout.splitlines()[-1]) for rank in done.ranks]
    assert found[0]["waited"][0] > 0.3 and found[1]["waited"][1] > 0.3, "who came first waited for the other"
    for number, one in enumerate(found):
        assert (one["shared"], one["late"]) == ("", ""), "a folder visible to all ranks"
        assert one["node-local"].startswith(f"output_dir: {tmp_path}/{number} on n2 is node-local"), "on both"
        for broken in (0, 1):
            assert f"/0 on n{broken + 1} cannot be written: Read-only file system" in one[f"read-only on {broken}"]
        assert one["left"] == ["0", "0/.lock", "1", "1/.lock", "late"], "nothing else is left behind"
