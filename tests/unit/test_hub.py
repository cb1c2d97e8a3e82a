"""Uploads to the Hub: what is sent, what must never be sent, and how failures are handled. No engine, no network."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from conftest import ROOT
from support.fake_hub import BREAK, TOKEN, FakeHub
from transformers import TrainerControl

from alignment.checkpoint.manifest import Manifest, files_in, record_of
from alignment.config.errors import HubError, OptionError
from alignment.methods.kto_options import KTOConfig
from alignment.run.retries import Retries
from alignment.run.stop import REQUESTS, StopReason
from alignment.training.hub import repository, uploads
from alignment.training.hub.contents import Subject, card_text, model_files, own_card, published_options
from alignment.training.hub.repository import Repository, prepared_repository
from alignment.training.hub.uploads import STAGING, Uploads

MODEL = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
SAID: list[str] = []


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single rank, whose messages are collected."""
    SAID.clear()
    for module in (uploads, repository):
        monkeypatch.setattr(module, "tell", SAID.append)
        monkeypatch.setattr(module, "on_first_rank", lambda compute: compute())
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(uploads, "from_first_rank", lambda value: value)
    monkeypatch.setattr(uploads, "before_threads_end", lambda call: None)


def test_only_listed_files_are_uploaded(tmp_path: Path) -> None:
    others = """log.jsonl completions.jsonl status.json report.md report.html trainer_state.json deepspeed.json STOP
        options.json notes.txt vocab.txt rows.json my.safetensors model.bin code.py modeling_mine.py .hidden""".split()
    for name in (*MODEL, *others, "additional_chat_templates/tool.jinja", "checkpoint-1/model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "secret").write_text("x")
    (tmp_path / "added_tokens.json").symlink_to(tmp_path / "secret")
    allowed = ["additional_chat_templates/tool.jinja", *MODEL]
    assert model_files(tmp_path, None) == allowed
    named = SimpleNamespace(vocab_files_names={"vocab_file": "vocab.txt"})
    assert model_files(tmp_path, named) == [*allowed, "vocab.txt"]
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModel": "modeling_mine.Mine"}}')
    assert "modeling_mine.py" in model_files(tmp_path, None) and "code.py" not in model_files(tmp_path, None)


def test_options_are_published_without_secrets_and_paths(tmp_path: Path) -> None:
    given = {"model_init_kwargs": {"token": "abc", "x": 1}, "dataset_name": "/a/b/c.json"}
    options = KTOConfig(str(tmp_path / "out"), hub_token="hf_mine", **given)
    found = json.loads(published_options(options.to_dict()))
    assert found["dataset_name"] == "c.json" and found["output_dir"] == "out" and found["method"] == "kto"
    assert found["model_init_kwargs"] == {"x": 1} and "hub_token" not in found
    assert not [word for word in ("hf_mine", "abc", "HUB_TOKEN", str(tmp_path)) if word in json.dumps(found)]
    assert "hf_mine" not in repr(options) and "hf_mine" not in repr(Repository("x", token="hf_mine"))


def test_the_card_has_the_callers_additions(tmp_path: Path) -> None:
    details = {"model_name": "mine", "dataset_name": "org/rows", "tags": ["a", "b"], "language": "en"}
    text = card_text(
        tmp_path, Subject("out", "other/base", False, True, ["own"]), {"method": "kto"}, details | {"license": "mit"}
    )
    assert yaml.safe_load(text.split("---")[1]) == {
        "base_model": "other/base", "datasets": ["org/rows"], "language": "en", "library_name": "peft",
        "license": "mit", "model_name": "mine", "pipeline_tag": "text-generation",
        "tags": ["deepspeed-alignment", "kto", "generated_from_trainer", "own", "a", "b"],
    }  # fmt: skip
    assert "# mine\n" in text and "only the adapter is here" in text
    whole = card_text(tmp_path, Subject("out", "other/base", True, False), {"method": "reward"}, {})
    head = yaml.safe_load(whole.split("---")[1])
    assert (head["library_name"], head["model_name"], head["base_model"]) == ("transformers", "out", "other/base")
    (tmp_path / "README.md").write_text(text)
    assert not own_card(tmp_path)
    (tmp_path / "README.md").write_text("---\ntags:\n- x\n---\n- deepspeed-alignment\n")
    assert own_card(tmp_path)


def prepared(folder: Path, retries: int = 0, **options: Any) -> Repository:
    args = KTOConfig(str(folder / "my-run"), **{"hub_token": TOKEN, **options})
    return prepared_repository(args, Retries(retries, 0.0))


def test_a_repository_is_created_once(hub: FakeHub, tmp_path: Path) -> None:
    assert not prepared(tmp_path, dry_run=True, hub_revision="dev").known and hub.repos == {}
    assert prepared(tmp_path, hub_private_repo=True, hub_revision="dev").name == "me/my-run"
    assert hub.repos["me/my-run"].private is True and set(hub.repos["me/my-run"].branches) == {"main", "dev"}
    assert prepared(tmp_path, hub_model_id="me/my-run").known and hub.count("repos/create") == 1


@pytest.mark.parametrize(
    ("faults", "options", "said"),
    [
        ({}, {"hub_token": "hf_wrongwrongwrong"}, "nvalid user token"), ({}, {"hub_model_id": "org/x"}, "403"),
        ({}, {"hub_model_id": "a/b/c"}, "HFValidationError"), ({"whoami": [429] * 9}, {}, "whoami|429"),
        ({}, {"hub_token": "hf_my token\n"}, "hub_token=<hidden>"), ({"whoami": [429]}, {}, None),
        ({}, {"hub_token": None}, "LocalTokenNotFoundError: .*hf auth login"), ("read", {}, "the token is read-only"),
    ],
)  # fmt: skip
def test_an_unavailable_repository_is_refused(
    faults: Any, options: dict[str, Any], said: str | None, hub: FakeHub, tmp_path: Path, monkeypatch: Any
) -> None:
    """``read`` is the role of a token; a token of this machine is not used."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    if faults == "read":
        hub.role, faults = faults, {}
    hub.faults = faults
    if said is None:
        assert prepared(tmp_path, retries=1).known
        return
    with pytest.raises(OptionError, match=said) as refused:
        prepared(tmp_path, **options)
    assert "\n" not in str(refused.value) and "hf_" not in str(refused.value)


def test_an_unreachable_hub_is_a_warning_for_a_run_that_resumes(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults = {"whoami": [503] * 2}
    assert not prepared(tmp_path, resume_from_checkpoint="latest").known and "warning: push_to_hub" in SAID[0]


def test_a_failure_does_not_reveal_the_token() -> None:
    said = Repository("x", token=TOKEN).failure(ValueError(f"bad header\n{TOKEN}."))
    assert said == "ValueError: bad header <hidden>"


class Run:
    """A run that saves a checkpoint at each step, as seen by uploads, with their messages."""

    def __init__(self, root: Path, hub: FakeHub, steps: int = 9, **options: Any) -> None:
        given = {"push_to_hub": True, "retry_pause": 0.0, "retries": 1, "hub_token": TOKEN, **options}
        self.args, self.root, self.hub = KTOConfig(str(root / "out"), **given), root / "out", hub
        self.root.mkdir(parents=True)
        self.log, self.events = list[dict[str, Any]](), list[str]()
        self.state = SimpleNamespace(global_step=0, max_steps=steps, epoch=0.0)
        context = SimpleNamespace(
            args=self.args, state=self.state, output_dir=self.root, processing_class=None, is_first=True,
            data=SimpleNamespace(sampler=1), retries=Retries(0, 0.0),
            log_file=SimpleNamespace(write=self.log.append), events=self.events.append,
        )  # fmt: skip
        subject = Subject("out", None, False, False)
        self.uploads = Uploads(context, lambda: subject, lambda: None)  # type: ignore[arg-type]
        self.uploads.repository = Repository("out", token=TOKEN, revision=self.args.hub_revision).ready()

    def save(self, weights: str = "model.safetensors", **control: bool) -> float:
        """Take a step and save its checkpoint; return the seconds that the upload took of training."""
        self.state.global_step += 1
        folder = self.root / f"checkpoint-{self.state.global_step}"
        folder.mkdir()
        for name in (weights, "config.json", "run_state.json", "optimizer.safetensors"):
            (folder / name).write_text(json.dumps(f"{name} {self.state.global_step}"))
        records = {name: record_of(folder / name) for name in files_in(folder)}
        Manifest("r", self.state.global_step, "kto", 1, 2, 8, 9, True, {}, {}, {}, records).write(folder)
        (folder / "mine.txt").write_text("written by a user")
        began = time.monotonic()
        self.uploads.on_save(self.args, self.state, TrainerControl(**control))
        return time.monotonic() - began

    @property
    def messages(self) -> list[str]:
        return [commit["message"] for commit in self.hub.repos["me/out"].commits]


@pytest.mark.parametrize(
    ("strategy", "path"),
    [("every_save", None), ("checkpoint", "last-checkpoint"), ("all_checkpoints", "checkpoint-1")],
)
def test_what_a_save_uploads(strategy: str, path: str | None, hub: FakeHub, tmp_path: Path) -> None:
    """A commit of the model, and one of the state, from files of the save, which is removed meanwhile."""
    none = Run(tmp_path / "none", hub, hub_strategy="end", steps=1)
    none.save()
    none.uploads.wait()
    run = Run(tmp_path, hub, hub_strategy=strategy)
    hub.pause, hub.pause_on = 0.3, "/preupload/"
    assert run.save("model-00001-of-00002.safetensors") < 0.3
    for file in (run.root / "checkpoint-1").iterdir():
        file.unlink()
    run.uploads.wait()
    one = ["Training in progress, step 1", *["Training in progress, step 1, checkpoint"] * (path is not None)]
    assert run.messages == one and run.events == ["on_push_begin"] and SAID == []
    model = {"README.md", "config.json", "model-00001-of-00002.safetensors", "options.json"}
    state = {"config.json", "manifest.json", "model-00001-of-00002.safetensors", "optimizer.safetensors"}
    whole = {f"{path}/{name}" for name in (*state, "run_state.json")} if path else set()
    assert set(hub.files("me/out")) == model | whole
    assert not (run.root / STAGING).exists() and run.log[0]["of"] == "checkpoint-1" and len(run.log[0]["commit"]) == 40
    run.save()  # replaces weights under other names, and the state if it has the same place
    run.uploads.wait()
    assert not {name for name in hub.files("me/out") if "-of-" in name and not name.startswith("checkpoint-1/")}
    assert run.messages == [*one, *(message.replace("1", "2") for message in one)]
    sent = [line for line in hub.requests if line.startswith("PUT")]
    assert len(sent) == len(set(sent)), "nothing is uploaded twice"


@pytest.mark.parametrize(("always", "steps"), [(False, [1, 3]), (True, [1, 2, 3])])
def test_a_save_during_an_upload_is_skipped_except_the_last(
    always: bool, steps: list[int], hub: FakeHub, tmp_path: Path
) -> None:
    run = Run(tmp_path, hub, steps=3, hub_always_push=always)
    hub.pause, hub.pause_on = 0.2, "/preupload/"
    for _ in range(3):
        run.save()
    run.uploads.wait()
    assert run.messages == [f"Training in progress, step {step}" for step in steps]
    assert SAID == [f"push_to_hub: uploaded checkpoint-3 to {hub.url}/me/out/commit/{len(steps):040x}"]


@pytest.mark.parametrize("fault", [500, BREAK, 403])
def test_a_failure_is_reported_once_and_the_next_save_tries_again(fault: Any, hub: FakeHub, tmp_path: Path) -> None:
    run = Run(tmp_path, hub)
    for number in range(4):
        hub.faults["/preupload/"] = [fault] * 9 if number < 3 else []
        run.save()
        run.uploads.wait()
    (said,) = SAID
    assert said.startswith("warning: push_to_hub: could not upload checkpoint-1 (")
    assert run.messages == ["Training in progress, step 4"] and TOKEN not in str(SAID) + str(run.log)
    assert ["error" in record for record in run.log] == [True, True, True, False]
    assert not (run.root / STAGING).exists()


@pytest.mark.parametrize(
    ("faults", "fails"), [([503] * 9, False), ([BREAK] * 5, False), ([503] * 99, True), ([403], True)]
)
def test_the_last_upload_is_retried_and_its_failure_prints_the_command(
    faults: list[Any], fails: bool, hub: FakeHub, tmp_path: Path
) -> None:
    run = Run(tmp_path, hub, steps=1, retries=3, hub_strategy="checkpoint", hub_revision="dev")
    hub.faults["/preupload/"] = faults
    run.save()
    future = run.uploads._open[-1].future
    with pytest.raises(HubError, match="^push_to_hub: ") if fails else contextlib.nullcontext():
        assert run.uploads.wait(future) is future.result()
    (said,) = SAID
    if not fails:
        assert said.startswith("push_to_hub: uploaded checkpoint-1 to ") and len(run.messages) == 2
        return
    staged = next((run.root / STAGING).iterdir())
    assert said.endswith(f" && hf upload me/out {staged}/last-checkpoint last-checkpoint --revision dev")
    assert f"run: hf upload me/out {staged}/model . --revision dev" in said
    assert (staged / "model" / "model.safetensors").exists() and (staged / "last-checkpoint/manifest.json").exists()


def test_a_failure_to_stage_does_not_end_the_run(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(uploads, "before_threads_end", at_exit.append)
    run = Run(tmp_path, hub, hub_strategy="checkpoint")
    run.state.global_step = 3
    run.uploads.on_save(run.args, run.state, TrainerControl())  # a checkpoint that does not exist
    assert "checkpoint-3: not a checkpoint" in SAID[0] and not list((run.root / STAGING).glob("*"))
    for _ in range(2):
        run.save()
        run.uploads.wait()
    assert len(at_exit) == 1, "the interpreter waits for the uploads that follow"


@pytest.mark.parametrize("stopping", [False, True])
def test_an_upload_that_hangs_is_given_up(
    stopping: bool, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_SLICE_S", 0.02)
    monkeypatch.setattr(uploads, "_GRACE_S" if stopping else "_LEAST_S", 0.1)
    run = Run(tmp_path, hub, hub_always_push=True)
    hub.pause, hub.pause_on = 60.0, "/preupload/"
    run.save()
    if stopping:
        REQUESTS.request(StopReason.STOP)
    else:
        run.save()
    try:
        run.save()  # not uploaded if the run is about to stop
        began = time.monotonic()
        run.uploads.wait()
    finally:
        REQUESTS.forget()
    assert time.monotonic() - began < 5 and [len(run.log)] == [1 if stopping else 3]
    (said,) = SAID
    assert said.startswith("warning: push_to_hub: could not upload checkpoint-1 (given up after 0 s")
    hub.pause = 0.0
    monkeypatch.setattr(uploads, "_LEAST_S", 60.0)
    run.save()  # by another thread
    run.uploads.wait()
    assert run.messages == [f"Training in progress, step {run.state.global_step}"]


def test_a_card_written_by_someone_else_is_kept(hub: FakeHub, tmp_path: Path) -> None:
    run = Run(tmp_path, hub)
    (run.root / "README.md").write_text("# mine\n")
    run.uploads.write_card(tags="x")
    run.save()
    run.uploads.wait()
    assert (run.root / "README.md").read_text() == "# mine\n" and hub.files("me/out")["README.md"] == b"# mine\n"


SCRIPT = """
import sys, threading, time
from pathlib import Path
sys.path[:0] = [{root!r} + "/tests", {root!r} + "/tests/unit"]
import test_hub
from alignment.training.hub import uploads
uploads.on_first_rank, uploads._LEAST_S, uploads.tell = lambda compute: compute(), {seconds}, print
run = test_hub.Run(Path({folder!r}), None)
(run.root / "model.safetensors").write_text("w" * 100)
run.uploads.push(run.root, "not waited for")
print("at the end", flush=True)
"""


@pytest.mark.ci
@pytest.mark.parametrize(("hangs_at", "xet"), [(None, 0), ("PUT", 0), ("xet-write-token", 1)])
def test_the_interpreter_waits_for_an_upload_that_ends_and_not_for_one_that_hangs(
    hangs_at: str | None, xet: int, hub: FakeHub, tmp_path: Path
) -> None:
    """With ``xet``, the client uploads with its own threads; without, in a thread pool that the interpreter joins."""
    hub.pause, hub.pause_on = (0.5, "/preupload/") if hangs_at is None else (300.0, hangs_at)
    script = SCRIPT.format(root=str(ROOT), folder=str(tmp_path), seconds=60.0 if hangs_at is None else 2.0)
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": str(1 - xet)}
    done = subprocess.run(  # in less time than a request hangs
        [sys.executable, "-c", script], env={**os.environ, **environment}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0 and done.stdout.startswith("at the end\n"), done.stderr[-2000:]
    if hangs_at is None:
        assert "push_to_hub: uploaded out to " in done.stdout and "model.safetensors" in hub.files("me/out")
    else:
        assert "the upload of out to me/out failed (given up after" in done.stdout
        assert hub.repos["me/out"].commits == []
        assert any(hangs_at in line for line in hub.requests), hub.requests
