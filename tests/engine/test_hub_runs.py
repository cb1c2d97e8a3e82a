"""Runs that upload to a fake Hub: uploaded files, messages, and failures that must not end a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import DRIVERS
from support.fake_hub import TOKEN, FakeHub
from support.helpers import STAGES, options, train_and_close, unpaired_rows

from alignment import KTOConfig, KTOTrainer
from alignment.checkpoint.manifest import Manifest
from alignment.config.errors import HubError
from tools.ranks import RankServer


def uploading(folder: Path, **more: Any) -> dict[str, Any]:
    """Return options of a run of three steps that saves and uploads each step."""
    hub = {"push_to_hub": True, "hub_token": TOKEN, "hub_always_push": True, "retry_pause": 0.0, "retries": 1}
    return options(folder, **{**hub, "max_steps": 3, "save_strategy": "steps", "save_steps": 1, **more})


def fetched(hub: FakeHub, path: str, folder: Path) -> Path:
    """Download a path of the repository to a folder."""
    for name, content in hub.files("me/out").items():
        if name.startswith(f"{path}/"):
            target = folder / name.removeprefix(f"{path}/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    return folder


def test_a_run_uploads_its_checkpoints_and_its_model(
    hub: FakeHub, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.faults["/commit/"] = [500]
    args = KTOConfig(**uploading(tmp_path, hub_strategy="all_checkpoints", save_total_limit=1))
    trainer = KTOTrainer(model=model, args=args, train_dataset=unpaired_rows(12))
    assert trainer.hub_model_id == "me/out" and hub.repos["me/out"].private is None
    trainer.train()
    (tmp_path / "out" / "notes.txt").write_text("written by a user")
    said = capsys.readouterr().out
    assert said.count("could not upload checkpoint-1 (HfHubHTTPError") == 1
    paths = {name.partition("/")[0] for name in hub.files("me/out") if "/" in name}
    assert paths == {"checkpoint-2", "checkpoint-3"}  # save_total_limit has removed the first one locally
    # A failure at the end is reported with the command to upload manually.
    hub.faults["/commit/"] = [500, 500]
    trainer.save_model()
    said = capsys.readouterr().out
    assert "push_to_hub: the upload of out to me/out failed" in said and "training is not affected" in said
    command = said.partition("To upload it, run: ")[2].strip().split()
    assert "Model save" not in [commit["message"] for commit in hub.repos["me/out"].commits]
    (tmp_path / "out" / "README.md").unlink()
    before = len(hub.repos["me/out"].commits)
    done = subprocess.run(
        [str(Path(sys.executable).with_name("hf")), *command[1:]], env={**os.environ, "HF_TOKEN": TOKEN}, check=False
    )
    assert done.returncode == 0 and len(hub.repos["me/out"].commits) == before + 1
    hub.faults["/preupload/"] = [403]
    with pytest.raises(HubError, match="push_to_hub: .*403"):
        trainer.push_to_hub()
    info = trainer.push_to_hub("mine", dataset_name="org/rows", license="mit", tags="x", revision="dev")
    assert info is not None and info.commit_message == "mine" and "dev" in hub.repos["me/out"].branches
    trainer.close()
    files = hub.files("me/out", "dev")
    assert {name for name in files if "/" not in name} == {
        *("README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"),
        *("options.json", "tokenizer.json", "tokenizer_config.json"),
    }
    head = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert head["datasets"] == ["org/rows"] and head["license"] == "mit" and {"kto", "x"} <= set(head["tags"])
    assert files["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()
    assert hub.tokens - {None} == {TOKEN}  # `hf` makes a request without a token
    for file in (path for path in (tmp_path / "out").rglob("*") if path.is_file()):
        assert TOKEN.encode() not in file.read_bytes(), file
    assert not any(TOKEN.encode() in content for content in files.values())
    # The upload is complete: a run resumes from it, and the repository is not created again.
    checkpoint = fetched(hub, "checkpoint-2", tmp_path / "fetched" / "checkpoint-2")
    Manifest.read(checkpoint).check_contents(checkpoint, Manifest.read(checkpoint).files)
    made = hub.count("repos/create")
    more = uploading(tmp_path / "again", hub_strategy="end", hub_model_id="out", max_steps=3)
    resumed = KTOTrainer(model=model, args=KTOConfig(**more), train_dataset=unpaired_rows(12))
    train_and_close(resumed, resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 3 and hub.count("repos/create") == made


@pytest.mark.ci
def test_two_ranks_upload_adapters_once(hub: FakeHub, model: str, tmp_path: Path, ranks: RankServer) -> None:
    more = {"use_peft": True, "lora_r": 2, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    more |= {"hub_strategy": "checkpoint", "hub_private_repo": True, "deepspeed": STAGES["stage3"]}
    args = uploading(tmp_path, gradient_accumulation_steps=1, **more)
    run = {"name": "run", "trainer": "KTO", "model": model, "args": args}
    run |= {"train": unpaired_rows(12), "eval": unpaired_rows(4), "save": args["output_dir"]}
    (tmp_path / "spec.json").write_text(json.dumps([run]))
    names = ("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET")
    ranks.run(DRIVERS / "runs.py", tmp_path / "spec.json", env={name: os.environ[name] for name in names})
    repo = hub.repos["me/out"]
    assert repo.private is True and hub.count("repos/create") == hub.count("whoami") == 1
    messages = [commit["message"] for commit in repo.commits]
    steps = [f"Training in progress, step {step}" for step in (1, 2, 3)]
    assert messages[:6] == [message for step in steps for message in (step, f"{step}, checkpoint")]
    files = hub.files("me/out")
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md", "training_base.json"} <= set(files)
    assert "model.safetensors" not in files and "config.json" not in files
    assert files["adapter_model.safetensors"] == (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    assert yaml.safe_load(files["README.md"].decode().split("---")[1])["library_name"] == "peft"
    checkpoint = fetched(hub, "last-checkpoint", tmp_path / "fetched")
    manifest = Manifest.read(checkpoint)
    manifest.check_contents(checkpoint, manifest.files)
    assert manifest.step == 3 and manifest.world_size == 2 and manifest.resumable
