"""Uploads to the Hub: what is sent, what must never be sent, and how failures are handled. No engine, no network."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from fake_hub import BREAK, TOKEN, FakeHub
from transformers import TrainerControl

from alignment.checkpoint.manifest import Manifest, files_in, record_of
from alignment.config.errors import HubError, OptionError
from alignment.methods.kto_options import KTOConfig
from alignment.run.retries import Retries
from alignment.run.stop import REQUESTS, StopReason
from alignment.training.hub import process, uploads, worker
from alignment.training.hub.card import Details, Subject, card_text, own_card
from alignment.training.hub.contents import checkpoint_files, model_files, published_options, stage
from alignment.training.hub.process import CUT_OFF, Answer, HubCall
from alignment.training.hub.pushes import Push, Pushes
from alignment.training.hub.repository import Repository, named_repository, ready_repository
from alignment.training.hub.uploads import STAGING, Uploads

MODEL = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


# What is uploaded ---------------------------------------------------------------------------------------------------


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
    assert model_files(tmp_path, SimpleNamespace(vocab_files_names={"vocab_file": "vocab.txt"})) == [
        *allowed,
        "vocab.txt",
    ]
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModel": "modeling_mine.Mine"}}')
    assert "modeling_mine.py" in model_files(tmp_path, None) and "code.py" not in model_files(tmp_path, None)


def test_options_are_published_without_secrets_and_paths(tmp_path: Path) -> None:
    options = KTOConfig(
        str(tmp_path / "out"),
        hub_token="hf_mine",
        model_init_kwargs={"token": "abc", "x": 1},
        dataset_name="/a/b/c.json",
    )
    found = json.loads(published_options(options.to_dict()))
    assert found["dataset_name"] == "c.json" and found["output_dir"] == "out" and found["method"] == "kto"
    assert found["model_init_kwargs"] == {"x": 1} and "hub_token" not in found
    assert not [word for word in ("hf_mine", "abc", "HUB_TOKEN", str(tmp_path)) if word in json.dumps(found)]
    assert "hf_mine" not in repr(options)


def test_staged_files_do_not_change(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a.json").write_text("old")
    assert stage(tmp_path / "run", ["a.json"], tmp_path / "aside", {"b.json": "text"}) == 7
    (tmp_path / "new").write_text("new")
    os.replace(tmp_path / "new", tmp_path / "run" / "a.json")  # like all writers of a run
    assert [(tmp_path / "aside" / name).read_text() for name in ("a.json", "b.json")] == ["old", "text"]


# The card -----------------------------------------------------------------------------------------------------------


def test_the_card_has_the_callers_additions(tmp_path: Path) -> None:
    details = Details("mine", "org/rows", ["a", "b"], "en", "mit", "org/base", None, "org/more", "my rows", "default")
    text = card_text(tmp_path, Subject("out", "other/base", False, True, ["own"]), {"method": "kto"}, details)
    head = yaml.safe_load(text.split("---")[1])
    assert head == {
        "base_model": "org/base",
        "datasets": ["org/rows", "org/more"],
        "language": "en",
        "library_name": "peft",
        "license": "mit",
        "model_name": "mine",
        "pipeline_tag": "text-generation",
        "tags": ["deepspeed-alignment", "kto", "generated_from_trainer", "own", "a", "b"],
    }
    assert "# mine\n" in text and "- dataset: my rows\n" in text and "only the adapter is here" in text
    whole = card_text(tmp_path, Subject("out", "other/base", True, False), {"method": "reward"}, Details())
    head = yaml.safe_load(whole.split("---")[1])
    assert (head["library_name"], head["model_name"], head["base_model"]) == ("transformers", "out", "other/base")
    assert head["pipeline_tag"] == "text-classification"
    (tmp_path / "README.md").write_text(text)
    assert not own_card(tmp_path)
    (tmp_path / "README.md").write_text("---\ntags:\n- x\n---\n- deepspeed-alignment\n")
    assert own_card(tmp_path)


# The Hub ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A fake Hub for this process and its child processes."""
    fake = FakeHub()
    for name, value in {"ENDPOINT": fake.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setenv("HF_ENDPOINT", fake.url)
    monkeypatch.setattr(
        "huggingface_hub.utils._http.time.sleep", lambda seconds: None
    )  # pauses before its own retries
    with fake.serving():
        yield fake


def request(folder: Path | None = None, **more: Any) -> dict[str, Any]:
    """Return a request with one part from a folder, for the repository ``me/x``."""
    part = {"folder": str(folder), "path": "", "message": "m", "replaces": ["model-*-of-*.safetensors"]}
    return {**Repository("x", token=TOKEN).request([part] if folder else []), **more}


def model_folder(folder: Path, weights: str = "model.safetensors", content: str = "w") -> Path:
    """Create a folder with a file of each kind."""
    folder.mkdir()
    (folder / weights).write_text(content)
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("---\ntags:\n- a\n---\n# x\n")
    return folder


def test_a_repository_is_created_once_and_stale_weights_are_deleted(hub: FakeHub, tmp_path: Path) -> None:
    first = model_folder(tmp_path / "a", "model-00001-of-00002.safetensors")
    asked = request(first, private=True, revision="dev")
    found = worker.answer(asked)
    assert found["repo"] == "me/x" and found["commits"][0]["oid"] == "1".zfill(40)
    assert hub.repos["me/x"].private is True and set(hub.repos["me/x"].branches) == {"main", "dev"}
    second = model_folder(tmp_path / "b")
    assert "error" not in worker.answer({**asked, "parts": request(second)["parts"], "known": False})
    assert hub.count("repos/create") == 1 and set(hub.files("me/x", "dev")) == {
        "README.md", "config.json", "model.safetensors",
    }  # fmt: skip
    assert hub.files("me/x", "main") == {}


def test_a_check_creates_nothing(hub: FakeHub) -> None:
    assert worker.answer(request(create=False, revision="dev")) == {"repo": "me/x", "commits": []}
    assert hub.repos == {}


@pytest.mark.parametrize(
    ("faults", "more", "message", "transient"),
    [
        ({}, {"token": "hf_wrongwrongwrong"}, "rejected the token (HTTP 401); run `hf auth login`", False),
        ({}, {"repo": "org/x"}, "no write access to org/x (HTTP 403)", False),
        ({"whoami": [429]}, {}, "HTTP 429", True),
        ({"commit": [403]}, {}, "no write access to x (HTTP 403)", False),
        ({"commit": [500]}, {}, "HTTP 500: Server error", True),
        ({"PUT": [500] * 9}, {}, "HTTP 500", True),
        ({"commit": [BREAK] * 9}, {}, "RemoteProtocolError", True),
        ({"PUT": [BREAK, 503]}, {}, None, True),
    ],
)
def test_failures(
    faults: Any, more: dict[str, Any], message: str | None, transient: bool, hub: FakeHub, tmp_path: Path
) -> None:
    hub.faults = faults
    found = worker.answer(request(model_folder(tmp_path / "a"), **more))
    if message is None:
        assert "error" not in found
        return
    assert message in found["error"] and found["transient"] is transient and "\n" not in found["error"]
    assert "hf_" not in found["error"]


def test_a_read_only_token(hub: FakeHub) -> None:
    hub.role = "read"
    found = worker.answer(request())
    assert "the token is read-only" in found["error"] and not found["transient"] and hub.repos == {}


def test_without_a_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    found = worker.answer(request(token=None))
    assert found["error"] == "no token found; run `hf auth login`, or set hub_token" and not found["transient"]


def test_offline_mode_is_reported_without_a_request(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = worker.answer(request())
    assert found["error"].startswith("HF_HUB_OFFLINE") and not found["transient"] and hub.requests == []


# Its process --------------------------------------------------------------------------------------------------------


def program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run this program instead of the worker."""
    (folder / "program.py").write_text(f"import sys, json, time\n{text}\n")
    monkeypatch.setattr(process, "_PROGRAM", folder / "program.py")


@pytest.mark.ci
def test_a_process_uploads(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    answer = HubCall()(request(model_folder(tmp_path / "a")), 60)
    assert answer.error is None and answer.repo == "me/x" and "model.safetensors" in hub.files("me/x")


def test_a_process_has_a_time_limit_and_can_be_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "time.sleep(60)", monkeypatch)
    began = time.monotonic()
    assert HubCall()(request(), 0.2) == Answer(error="timed out after 0 s", transient=True)
    call = HubCall()
    threading.Timer(0.1, call.cut_off).start()
    assert call(request(), 60) == Answer(error=CUT_OFF) == call(request(), 60)
    assert time.monotonic() - began < 20


def test_a_crashing_process_does_not_reveal_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "raise ValueError(json.loads(sys.stdin.readline())['token'])", monkeypatch)
    answer = HubCall()(request(), 60)
    assert answer.transient and "status 1: ValueError: <hidden>" in str(answer.error)


# The repository -----------------------------------------------------------------------------------------------------


class Calls:
    """Returns the answers in turn, then successes; each waits for ``gate``."""

    def __init__(self, *answers: Answer) -> None:
        self.answers, self.requests = list(answers), list[Mapping[str, Any]]()
        self.gate = threading.Event()
        self.gate.set()
        self.came = threading.Event()
        self.over = False

    def __call__(self, request: Mapping[str, Any], seconds: float) -> Answer:
        self.requests.append(request)
        self.came.set()
        self.gate.wait(10)
        if self.over:
            return Answer(error=CUT_OFF)
        good = Answer("me/x", tuple({"url": "u", "oid": "o", "message": p["message"]} for p in request["parts"]))
        return self.answers.pop(0) if self.answers else good

    def cut_off(self) -> None:
        self.over = True
        self.gate.set()


def test_the_default_name_is_that_of_the_folder(tmp_path: Path) -> None:
    assert named_repository(KTOConfig(str(tmp_path / "my-run"))).name == "my-run"
    assert named_repository(KTOConfig("out", hub_model_id="a/b")).name == "a/b"
    for options in ({"output_dir": "my run"}, {"hub_model_id": "a/b/c", "output_dir": "out"}):
        with pytest.raises(OptionError, match=r"hub_model_id.*is not a valid repository name"):
            named_repository(KTOConfig(**options))
    with pytest.raises(OptionError) as refused:
        named_repository(KTOConfig("out", hub_token="hf_my token\n"))
    assert "hub_token=<hidden>" in str(refused.value) and "hf_my" not in str(refused.value)


def test_requests_for_a_repository_are_retried() -> None:
    calls = Calls(Answer(error="HTTP 503", transient=True), Answer(error="HTTP 429", transient=True))
    slept: list[float] = []
    found = ready_repository(Repository("x"), Retries(2, 1.0, slept.append), call=lambda: calls)
    assert (found.name, found.known, len(calls.requests)) == ("me/x", True, 3) and sum(slept) == 3.0
    bad = Calls(Answer(error="no token"))
    with pytest.raises(OptionError, match="push_to_hub: no token"):
        ready_repository(Repository("x"), Retries(2, 1.0, slept.append), call=lambda: bad)
    busy = Calls(*[Answer(error="HTTP 503", transient=True)] * 2)
    with pytest.raises(ConnectionError, match="503"):
        ready_repository(Repository("x"), Retries(1, 0.0, slept.append), call=lambda: busy)


# The queue ----------------------------------------------------------------------------------------------------------


def push_of(folder: Path, **more: Any) -> Push:
    folder.mkdir(parents=True)
    return Push(**{"label": folder.name, "step": 1, "request": request(), "folder": folder, "size": 1, **more})


def test_pushes_run_in_order_and_are_retried(tmp_path: Path) -> None:
    busy = Answer(error="HTTP 500", transient=True)
    calls = Calls(busy, Answer(), busy, busy, Answer(error="HTTP 403"))
    pushes = Pushes(calls, pause=0.0)
    each = [push_of(tmp_path / name, tries=2, last=name == "b") for name in "abc"]
    for push in each:
        pushes.add(push)
    assert pushes.wait(10) and not pushes.busy
    assert [(o.push.label, o.answer.error) for o in pushes.outcomes()] == [
        ("a", None),
        ("b", "HTTP 500"),
        ("c", "HTTP 403"),
    ]
    assert each[0].future.result() == Answer()
    with pytest.raises(HubError, match="HTTP 500"):
        each[1].future.result()
    assert len(calls.requests) == 5 and [push.folder.exists() for push in each] == [False, True, False]
    assert TOKEN not in repr(each) + repr(Repository("x", token=TOKEN))


# A run --------------------------------------------------------------------------------------------------------------

SAID: list[str] = []


@pytest.fixture(autouse=True)
def _collected_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    SAID.clear()
    monkeypatch.setattr(uploads, "tell", SAID.append)


class Run:
    """A run that saves a checkpoint at each step, as seen by uploads, with their messages."""

    def __init__(self, root: Path, *answers: Answer, steps: int = 9, **options: Any) -> None:
        self.args = KTOConfig(str(root / "out"), push_to_hub=True, retry_pause=0.0, hub_token=TOKEN, **options)
        self.root, self.said, self.log = root / "out", SAID, list[dict[str, Any]]()
        self.root.mkdir()
        self.state = SimpleNamespace(global_step=0, max_steps=steps, epoch=0.0)
        self.calls, self.events = Calls(*answers), list[str]()
        context = SimpleNamespace(
            args=self.args, state=self.state, output_dir=self.root, processing_class=None, is_first=True,
            data=SimpleNamespace(sampler=1),
            log_file=SimpleNamespace(write=self.log.append), events=self.events.append,
        )  # fmt: skip
        subject = Subject("out", None, False, False)
        self.uploads = Uploads(context, lambda: subject, call=lambda: self.calls)  # type: ignore[arg-type]
        self.uploads.use(Repository("me/x", known=True, token=TOKEN))

    def save(self, **control: bool) -> None:
        """Take a step and save its checkpoint."""
        self.state.global_step += 1
        folder = model_folder(self.root / f"checkpoint-{self.state.global_step}")
        (folder / "run_state.json").write_text("{}")
        (folder / "optimizer.safetensors").write_text("s")
        records = {name: record_of(folder / name) for name in files_in(folder)}
        Manifest("r", self.state.global_step, "kto", 1, 2, 8, 9, True, {}, {}, {}, records).write(folder)
        (folder / "mine.txt").write_text("written by a user")
        self.uploads.on_save(self.args, self.state, TrainerControl(**control))

    def idle(self) -> None:
        """Wait for the uploads and collect their outcomes."""
        pushes = self.uploads._pushes
        assert pushes is None or pushes.wait(10)
        self.uploads.report()

    @property
    def sent(self) -> list[list[tuple[str, str]]]:
        """Return path and message of each part of each request."""
        return [[(p["path"], p["message"]) for p in request["parts"]] for request in self.calls.requests]


def content(part: Mapping[str, Any]) -> list[str]:
    """Return the files that a part would upload."""
    return files_in(Path(part["folder"])) + [p.name for p in Path(part["folder"]).glob("manifest.json")]


@pytest.mark.parametrize(
    ("strategy", "path"),
    [("every_save", None), ("checkpoint", "last-checkpoint"), ("all_checkpoints", "checkpoint-1")],
)
def test_what_a_save_uploads(strategy: str, path: str | None, tmp_path: Path) -> None:
    run = Run(tmp_path, hub_strategy=strategy)
    run.calls.gate.clear()
    run.save()
    assert run.calls.came.wait(10)
    (request,) = run.calls.requests
    head = ("", "Training in progress, step 1")
    assert run.sent == [[head] if path is None else [head, (path, f"{head[1]}, checkpoint")]]
    assert content(request["parts"][0]) == ["README.md", "config.json", "model.safetensors", "options.json"]
    if path is not None:
        whole = ["README.md", "config.json", "model.safetensors", "optimizer.safetensors", "run_state.json"]
        assert content(request["parts"][1]) == [*whole, "manifest.json"]
        assert set(checkpoint_files(tmp_path / "out" / "checkpoint-1")) == {*whole, "manifest.json"}
    run.calls.gate.set()
    run.idle()
    assert not (run.root / STAGING).exists() and run.events == ["on_push_begin"]
    assert run.log[0]["of"] == "checkpoint-1" and run.log[0]["commit"] == "o" and run.said == []


def test_upload_at_the_end_only(tmp_path: Path) -> None:
    run = Run(tmp_path, hub_strategy="end", steps=1)
    run.save()
    assert run.sent == [] and run.uploads._pushes is None


def test_a_save_during_an_upload_is_skipped_except_the_last(tmp_path: Path) -> None:
    run = Run(tmp_path, steps=3)
    run.calls.gate.clear()
    for _ in range(3):
        run.save()
    run.calls.gate.set()
    run.idle()
    assert [parts[0][1] for parts in run.sent] == ["Training in progress, step 1", "Training in progress, step 3"]
    (tmp_path / "always").mkdir()
    always = Run(tmp_path / "always", hub_always_push=True)
    always.calls.gate.clear()
    for _ in range(2):
        always.save()
    always.calls.gate.set()
    always.idle()
    assert len(always.sent) == 2


def test_a_failure_is_reported_once_and_uploads_stop_after_three(tmp_path: Path) -> None:
    run = Run(tmp_path, *[Answer(error="HTTP 500", transient=True)] * 3, steps=6)
    for _ in range(5):
        run.save()
        run.idle()
    assert len(run.calls.requests) == 3
    assert len(run.said) == 2 and "step 1" not in run.said[1]
    assert run.said[0].startswith("warning: push_to_hub: could not upload checkpoint-1 (HTTP 500); training continues")
    assert "3 consecutive uploads" in run.said[1]
    run.save()  # the last one is attempted anyway
    run.idle()
    assert len(run.calls.requests) == 4 and run.said[2] == "push_to_hub: uploaded checkpoint-6 to u"
    assert TOKEN not in str(run.said) + str(run.log)


def test_the_last_failure_prints_the_upload_commands(tmp_path: Path) -> None:
    busy = Answer(error="HTTP 500", transient=True)
    run = Run(tmp_path, *[busy] * 4, steps=1, retries=3, hub_strategy="checkpoint", hub_revision="dev")
    run.uploads.use(Repository("me/x", known=True, revision="dev"))
    run.save()
    run.idle()
    assert len(run.calls.requests) == 4
    (said,) = run.said
    staged = next((run.root / STAGING).iterdir())
    assert said.endswith(
        f"run: hf upload me/x {staged}/model . --revision dev && "
        f"hf upload me/x {staged}/checkpoint last-checkpoint --revision dev"
    )
    assert (staged / "model" / "model.safetensors").exists() and "training is not affected" in said


def test_a_failure_to_stage_does_not_end_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, hub_strategy="checkpoint")
    run.state.global_step = 3
    run.uploads.on_save(run.args, run.state, TrainerControl())  # a checkpoint that does not exist
    assert "checkpoint-3: not a checkpoint" in run.said[0] and run.calls.requests == []
    assert not list((run.root / STAGING).glob("*"))


def test_a_stop_starts_no_upload_and_does_not_wait(tmp_path: Path) -> None:
    run = Run(tmp_path, hub_always_push=True)
    run.calls.gate.clear()
    run.save()
    assert run.calls.came.wait(10)
    REQUESTS.request(StopReason.STOP)
    try:
        run.save()
    finally:
        REQUESTS.forget()
    run.uploads.cut_off(0.0)
    assert len(run.calls.requests) == 1 and run.said == [f"push_to_hub: the upload of checkpoint-1 was {CUT_OFF}"]


@pytest.mark.parametrize("stopping", [False, True])
def test_the_end_of_a_run_waits_for_its_uploads_unless_it_is_asked_to_stop(
    stopping: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_SLICE_S", 0.02)
    monkeypatch.setattr(uploads, "_GRACE_S", 0.1)
    monkeypatch.setattr(uploads, "from_first_rank", lambda value: value)
    run = Run(tmp_path)
    run.calls.gate.clear()
    run.save()
    assert run.calls.came.wait(10)
    opening = threading.Timer(0.3, run.calls.gate.set)
    REQUESTS.request(StopReason.STOP) if stopping else opening.start()
    try:
        run.uploads.wait()
    finally:
        REQUESTS.forget()
        opening.cancel()
        run.calls.gate.set()
    assert run.said == ([f"push_to_hub: the upload of checkpoint-1 was {CUT_OFF}"] if stopping else [])


def test_a_card_written_by_someone_else_is_kept(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (run.root / "README.md").write_text("# mine\n")
    run.calls.gate.clear()
    run.save()
    assert run.calls.came.wait(10)
    part = run.calls.requests[0]["parts"][0]
    assert (Path(part["folder"]) / "README.md").read_text() == "# mine\n"
    run.uploads.write_card(run.root)
    assert (run.root / "README.md").read_text() == "# mine\n"
    run.calls.gate.set()
    run.idle()


@pytest.mark.parametrize(
    ("config", "code"), [(None, False), ("{}", False), ("{torn", False), ("[]", False), ('{"auto_map": {}}', True)]
)
def test_code_is_uploaded_if_the_config_names_it(config: str | None, code: bool, tmp_path: Path) -> None:
    for name in ("model.safetensors", "modeling_x.py", "log.jsonl"):
        (tmp_path / name).write_text("")
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    named = ["config.json"] * (config is not None)
    assert model_files(tmp_path, None) == [*named, "model.safetensors", *["modeling_x.py"] * code]


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ('warning\n\n{"repo": "a/b", "commits": ["c"]}\n', Answer("a/b", ("c",))),
        ('{"error": "no", "transient": false}', Answer(error="no", transient=False)),
        (
            "first\nlast secret\n\n",
            Answer(error="the upload process exited with status 3: last <hidden>", transient=True),
        ),
        ("", Answer(error="the upload process exited with status 3: ", transient=True)),
        ("[]", Answer(error="the upload process exited with status 3: []", transient=True)),
        ("1", Answer(error="the upload process exited with status 3: 1", transient=True)),
    ],
)
def test_the_last_line_of_the_upload_process_is_its_answer(said: str, answer: Answer) -> None:
    assert process._answer(said, 3, "secret") == answer
    assert process._answer(said, 3, None).error == (answer.error and answer.error.replace("<hidden>", "secret"))


@pytest.mark.parametrize(
    ("pause", "tries", "pauses"), [(100.0, 5, [100, 200, 300, 300]), (1.0, 3, [1, 2]), (1.0, 1, []), (0, 2, [0])]
)
def test_pauses_between_uploads_double_up_to_five_minutes(
    pause: float, tries: int, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    pushes = Pushes(lambda request, seconds: Answer(error="busy", transient=True), pause)
    monkeypatch.setattr(pushes._over, "wait", waited.append)
    push: Any = SimpleNamespace(request={}, size=0, tries=tries)
    assert pushes._tried(push).error == "busy" and waited == pauses
