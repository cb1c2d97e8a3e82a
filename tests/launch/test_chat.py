"""``chat``: answers of every kind of model, the conversation and its commands, comparisons, refusals, a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from conftest import ROOT
from support.data_tokenizers import CHATML, PLAIN, char_tokenizer
from support.helpers import make_classifier, make_model
from support.tiny_adapters import lora, make_adapter
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from alignment.checkpoint import trained_model
from alignment.checkpoint.folder import checkpoint_folder
from alignment.checkpoint.manifest import Manifest, files_in, record_of
from alignment.cli import chat as chat_command
from alignment.cli import chat_session
from alignment.cli.commands import main
from alignment.models.adapters import merging
from alignment.models.adapters.folder import write_training_base
from alignment.models.tasks import CAUSAL_LM
from tools.ranks.client import environment

SHORT = ("--max_new_tokens", "12")
GREEDY = (*SHORT, "--temperature", "0")
IN_4_BITS = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.float32,
    bnb_4bit_quant_storage="float32",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models by kind, each with a conversation template."""
    folder = tmp_path_factory.mktemp("chat")
    base = make_model(folder / "full")
    make_model(folder / "other", seed=1)
    for name in ("adapter", "adapter-4bit"):
        make_adapter(folder / name, base, lora())
    quantization = IN_4_BITS.to_dict()
    facts: dict[str, Any] = {"base_model": base, "revision": None, "task": CAUSAL_LM, "dtype": "float32"}
    write_training_base(folder / "adapter-4bit", quantization=quantization, **facts)
    for step, kind in ((5, "full"), (10, "other"), (20, "full")):
        target = checkpoint_folder(folder / "run", step)
        shutil.copytree(folder / kind, target)
        (target / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        files = {name: record_of(target / name) for name in files_in(target)}
        Manifest("r", step, "kto", 1, 0, 8, 40, True, {}, {}, {}, files).write(target)
    (folder / "run" / "checkpoint-20" / "model.safetensors").unlink()
    options = {"method": "kto", "model_name_or_path": str(folder / "full")}
    (folder / "run" / "options.json").write_text(json.dumps(options))
    return folder


def chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lines: str, *argv: object
) -> tuple[object, str, str]:
    """Status, stdout and stderr of the command with these lines in a pipe."""
    capsys.readouterr()  # bars of models that the test has loaded
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    with pytest.raises(SystemExit) as leaving:
        main(["chat", *map(str, argv)], program="da")
    return leaving.value.code, *capsys.readouterr()


def parsed(folder: Path, **sampling: Any) -> Namespace:
    """The arguments of the command for the model of a folder."""
    given = chat_command._parser("da").parse_args([str(folder)])
    given.sampling = sampling
    return given


def answer(model: Any, tokenizer: Any, prompt: str) -> str:
    """A greedy answer of at most 12 tokens, by transformers alone."""
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    row = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=1)
    return tokenizer.decode(row[0, ids.shape[1] :], skip_special_tokens=True)


def expected(models: Path, kind: str, *messages: str) -> str:
    """What a model answers to the last of the messages, those of user and assistant in turn."""
    base = AutoModelForCausalLM.from_pretrained(
        models / ("other" if kind == "other" else "full"),
        **({"quantization_config": IN_4_BITS, "device_map": {"": "cpu"}} if "4bit" in kind else {}),
    )
    model = peft.PeftModel.from_pretrained(base, models / kind) if "adapter" in kind else base
    turns = [f"{'assistant' if place % 2 else 'user'}: {text}\n" for place, text in enumerate(messages)]
    return answer(model.eval(), char_tokenizer(), "".join(turns) + "assistant:")


@pytest.mark.parametrize(
    ("run", "kind"),
    [("full", "full"), ("adapter", "adapter"), ("adapter-4bit", "adapter-4bit"), ("run", "other"),
     ("run/checkpoint-5", "full")],
)  # fmt: skip
def test_a_pipe_gets_the_answers_of_the_model(
    models: Path, run: str, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = expected(models, kind, "hello")
    second = expected(models, kind, "hello", first, "and you")
    code, out, err = chat(capsys, monkeypatch, "hello\n\n  and you\n", models / run, *GREEDY)
    assert (code, out) == (0, f"{first}\n{second}\n")
    where = "run/checkpoint-10" if run == "run" else run  # the newest one is damaged
    assert err.startswith(f"{models / where}: ") and err.endswith("float32 on cpu\n") and len(err.splitlines()) == 1


def test_an_adapter_on_the_hub_is_downloaded(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = {"me/adapter": models / "adapter", "me/full": models / "full"}
    monkeypatch.setattr(trained_model, "snapshot_download", lambda name, allow_patterns: str(hub[name]))
    found = trained_model.find_model("me/adapter", "RUN")
    assert (found.found, found.path) == (str(models / "adapter"), str(models / "full"))
    assert trained_model._folder("me/full", "RUN") is None, "transformers downloads a full model"


def test_an_adapter_is_loaded_in_the_dtype_of_its_training(models: Path, tmp_path: Path) -> None:
    """Also modules that were trained fully, which PEFT and the merge widen."""
    make_adapter(tmp_path, str(models / "full"), lora(modules_to_save=["lm_head"]))
    facts: dict[str, Any] = {"revision": None, "task": CAUSAL_LM, "dtype": "bfloat16"}
    write_training_base(tmp_path, base_model=str(models / "full"), quantization=None, **facts)
    model = trained_model.find_model(str(tmp_path), "RUN").load(torch.device("cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.generate(torch.ones((1, 1), dtype=torch.long), max_new_tokens=2).shape[1] > 1


def test_a_comparison_answers_with_the_start_and_the_same_seed(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, load = list[str](), merging.load_whole
    monkeypatch.setattr(
        merging, "load_whole", lambda path, *rest, **more: (loaded.append(path), load(path, *rest, **more))[1]
    )
    alone = {kind: chat(capsys, monkeypatch, "hello\nyou\n", models / kind, *SHORT)[1] for kind in ("full", "adapter")}
    assert alone["full"] != alone["adapter"] and len(loaded) == 2
    _, out, err = chat(capsys, monkeypatch, "hello\n/reset\nyou\n", models / "adapter", *SHORT, "--compare")
    assert len(loaded) == 3  # the base is the model of the adapter
    texts = {"full": [], "adapter": []}
    for part in out.split("== ")[1:]:
        title, _, text = part.partition(" ==\n")
        texts[Path(title).name].append(text)
    assert {kind: found[0] for kind, found in texts.items()} == {
        kind: text[: len(texts[kind][0])] for kind, text in alone.items()
    }
    assert len(err.splitlines()) == 2
    _, out, _ = chat(capsys, monkeypatch, "hello\n", models / "run", *GREEDY, "--compare")
    titles = [f"== {models / name} ==\n" for name in ("run/checkpoint-10", "full")]
    answers = [expected(models, kind, "hello") for kind in ("other", "full")]
    assert out == "".join(f"{title}{text}\n" for title, text in zip(titles, answers))
    _, out, _ = chat(capsys, monkeypatch, "hello\n", models / "full", *GREEDY, "--compare", models / "other")
    assert [line for line in out.splitlines() if line.startswith("==")] == [
        f"== {models / 'full'} ==", f"== {models / 'other'} =="
    ]  # fmt: skip


def test_commands(models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(lines: str, *more: object) -> list[str]:
        code, out, err = chat(capsys, monkeypatch, lines, models / "full", *SHORT, "--top_k", 5, *more)
        assert code == 0
        said.append(err)
        return out.splitlines()

    said: list[str] = []
    monkeypatch.setattr(chat_session._Streamer, "put", lambda self, value: None)  # shows only which prompt was given
    prompts: list[str] = []
    encode = chat_session.RowTokenizer.encode

    def encoded(self: Any, sources: Any) -> Any:
        rows = encode(self, sources)
        prompts.append(self.tokenizer.decode(rows[0].prompt))
        return rows

    monkeypatch.setattr(chat_session.RowTokenizer, "encode", encoded)
    seeds: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    answers("a\n/regenerate\nb\n/reset\n/regenerate\nc\n/what\n/quit\nd\n", "--seed", 7, "--system", "x")
    start, end = "system: x\nuser: a\n", "assistant:"
    assert prompts == [
        f"{start}{end}", f"{start}{end}", f"{start}assistant: \nuser: b\n{end}", f"system: x\nuser: c\n{end}"
    ]  # fmt: skip
    assert seeds[-4:] == [7, 8, 9, 10]
    assert said[0].count("/regenerate  answer the last") == 2, "nothing to answer again, and an unknown command"


def test_ctrl_c_ends_an_answer_which_stays_in_the_conversation(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put, count = chat_session._Streamer.put, 0

    def interrupted(self: Any, value: Any) -> None:
        nonlocal count
        put(self, value)
        count += 1
        if count == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat_session._Streamer, "put", interrupted)
    lines = iter(["hello", "x" * 100, "and", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True, reconfigure=lambda errors: None))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    chat_session.chat(parsed(models / "full", max_new_tokens=12, top_k=1, seed=1))
    out, err = capsys.readouterr()
    begun = expected(models, "full", "hello")[:5]
    assert out == f"{begun}\n{expected(models, 'full', 'hello', begun, 'and')}\n", "without the refused message"
    assert re.search(rf"error: \d+ tokens fill the positions of {models / 'full'}; use /reset\n$", err)


def test_an_answer_ends_at_the_last_position(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "a" * 74  # 91 tokens with the template
    code, out, err = chat(capsys, monkeypatch, f"{message}\nb\n", models / "full", *GREEDY)
    assert code == 1 and out == expected(models, "full", message)[:5] + "\n"
    assert err.endswith(f" tokens fill the positions of {models / 'full'}; use /reset\n")


@pytest.mark.parametrize("template", [None, PLAIN])
def test_plain_text(
    models: Path, template: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    folder = Path(shutil.copytree(models / "full", tmp_path / "plain", ignore=shutil.ignore_patterns("*.jinja")))
    char_tokenizer(template=template).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    texts = [answer(model, char_tokenizer(), prompt) for prompt in ("hello", "world")]
    given = () if template is None else ("--apply_chat_template", "false")
    code, out, err = chat(capsys, monkeypatch, "hello\nworld\n", folder, *GREEDY, *given)
    assert (code, out) == (0, "".join(f"{text}\n" for text in texts))
    assert err.endswith("; without a chat template, each message is a prompt of its own\n")


def test_the_turn_of_a_template_ends_an_answer(models: Path, tmp_path: Path) -> None:
    char_tokenizer(template=CHATML).save_pretrained(shutil.copytree(models / "full", tmp_path / "turns"))
    ends = AutoTokenizer.from_pretrained(tmp_path / "turns").convert_tokens_to_ids(["</s>", "<|im_end|>"])
    (speaker,) = chat_session._speakers(parsed(tmp_path / "turns", max_new_tokens=512, top_k=1, top_p=0.5))
    sampling = speaker.sampling
    assert sampling == replace(sampling, eos_token_ids=tuple(ends), top_k=1, top_p=0.5, temperature=1.0)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("FOLDER/nothing",), "error: RUN: folder 'FOLDER/nothing' does not exist; set RUN to"),
        (("FOLDER",), "error: RUN: FOLDER contains no model: it has neither config.json nor adapter_config.json, and"),
        (("FOLDER/scores",), "error: RUN: FOLDER/scores is a reward model, which generates no text; pass a causal"),
        (("FOLDER/full", "--compare"), "error: compare: FOLDER/full does not tell which model it was trained from;"),
        (("FOLDER/moved", "--compare"), "error: start of FOLDER/moved (name it if the run was started in another"),
        (("FOLDER/full", "--compare", "FOLDER/x"), "error: compare: folder 'FOLDER/x' does not exist; set compare to"),
        (("FOLDER/full", "--top_p", "2"), "error: top_p='2': must be less than or equal to 1"),
        (
            ("FOLDER/full", "--apply_chat_template", "false", "--system", "a"),
            "system='a': only a chat template has",
        ),
        (("FOLDER/run/checkpoint-20",), "checkpoint-20/model.safetensors: missing"),
        (("FOLDER/adapter", "--base", "FOLDER/wide"), "does not fit its base model"),
    ],
)
def test_refusals(
    models: Path, argv: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in ("full", "adapter", "run"):
        (tmp_path / name).symlink_to(models / name)
    if "scores" in argv[0]:
        make_classifier(tmp_path / "scores")
    if "moved" in argv[0]:
        shutil.copytree(models / "full", tmp_path / "moved")
        (tmp_path / "moved" / "options.json").write_text('{"model_name_or_path": "elsewhere/model"}')
    if "--base" in argv:
        make_model(tmp_path / "wide", "narrow")
    given = [each.replace("FOLDER", str(tmp_path)) for each in argv]
    code, out, err = chat(capsys, monkeypatch, "hello\n", *given)
    assert (code, out) == (1, "") and says.replace("FOLDER", str(tmp_path)) in err.splitlines()[-1]
    assert "Traceback" not in err


def test_it_is_a_single_process(models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = chat(capsys, monkeypatch, "", models / "full")
    assert code == 1 and err.endswith("but WORLD_SIZE is 2; start it without a launcher\n")


@pytest.mark.ci
def test_a_terminal(models: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(models / "full", tmp_path / "long")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 100_000}))
    ours, theirs = pty.openpty()
    command = [sys.executable, ROOT / "launch" / "chat.py", folder, "--temperature", "0", "--max_new_tokens", "50000"]
    env = environment(PYTHONPATH=str(ROOT), TERM="dumb")
    process = subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    seen = [""]  # what the terminal received after each input

    def until(there: Callable[[str], object]) -> None:
        deadline = time.monotonic() + 120
        while not there(seen[-1]):
            assert time.monotonic() < deadline and process.poll() is None, seen
            if select.select([ours], [], [], 0.1)[0]:
                seen[-1] += os.read(ours, 4096).decode(errors="replace")

    def prompted(text: str) -> bool:
        """Whether readline waits for a line: the terminal passes each key on."""
        return text.endswith("\r\n> ") and not termios.tcgetattr(ours)[3] & termios.ICANON

    def send(given: bytes | None) -> None:
        """Press these keys; None for Ctrl-C."""
        seen.append("")
        process.send_signal(signal.SIGINT) if given is None else os.write(ours, given)

    try:
        until(prompted)
        send(b"hello\n")
        until(lambda text: text and termios.tcgetattr(ours)[3] & termios.ICANON)  # readline has returned the line
        time.sleep(2)  # within an answer that takes a minute
        send(None)
        until(prompted)
        send(b"abc")
        until(lambda text: text.endswith("abc"))
        send(None)  # discards the line
        until(prompted)
        send(b"/help\n")
        until(prompted)
        assert "/regenerate" in seen[-1]
        send(b"\x04")  # Ctrl-D
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(ours)
    assert "Traceback" not in "".join(seen) and "Type a message" in seen[0]
