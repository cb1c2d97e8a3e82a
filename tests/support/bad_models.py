"""Invalid models and tokenizers for ``test_bad_input``: copies of a valid model with one defective file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.bad_case import CHAT, Case
from support.bad_json import NESTED

Edit = Callable[[Path], object]


def model(name: str, edit: Edit, *says: str, kind: str = "model", data: Any = None, **options: str) -> Case:
    """A copy of the valid model, modified by ``edit``."""

    def make(folder: Path, models: Path) -> None:
        shutil.copytree(models / "good", folder / "m")
        edit(folder / "m")

    return Case(f"{kind}: {name}", says, {"model_name_or_path": "@m", **options}, data=data, make=make)


def tokenizer(name: str, edit: Edit, *says: str, data: Any = None) -> Case:
    """A copy of the valid model with a defective tokenizer."""
    return model(name, edit, *says, kind="tokenizer", data=data)


def template(name: str, text: str | bytes, *says: str) -> Case:
    """A copy of the valid model with a chat template, and conversational data."""
    return tokenizer(f"template {name}", written("chat_template.jinja", text), *says, data=[CHAT])


def written(name: str, content: str | bytes) -> Edit:
    """Return a function that replaces a file."""
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def folder_instead(name: str) -> Edit:
    """Return a function that replaces a file with a folder."""

    def edit(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return edit


def changed(name: str, **values: Any) -> Edit:
    """Return a function that changes values in a JSON file."""
    return lambda folder: (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **values}))


def config(**values: Any) -> Edit:
    """Change the configuration."""
    return changed("config.json", **values)


def own(**values: Any) -> Edit:
    """Change the tokenizer's configuration."""
    return changed("tokenizer_config.json", **values)


def adapter(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def without_tokenizer(folder: Path) -> None:
    for file in (*folder.glob("token*"), *folder.glob("*.jinja")):
        file.unlink()


INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
UNUSABLE, TORN, NO_TOKENIZER = "the configuration of", "is truncated or corrupt", "no tokenizer could be loaded from"

MODELS = [
    model("configuration a list", written("config.json", "[]"), UNUSABLE),
    model("configuration nested", written("config.json", NESTED), UNUSABLE),
    model("of an unknown type", config(model_type="zebra"), UNUSABLE, "zebra"),
    model("heads that do not divide it", config(num_attention_heads=5), UNUSABLE, "attention heads (5)"),
    model("positions by length", config(rope_parameters=DYNAMIC), "pack: true", "RoPE type dynamic", pack="true"),
    model("with code of its own", config(auto_map={"AutoConfig": "a.B"}, model_type="z"), "trust_remote_code"),
    model("weights a pointer", written(WEIGHTS, POINTER), "is a Git LFS pointer", "git lfs pull"),
    model("weights with a huge header", written(WEIGHTS, (2**62).to_bytes(8, "little") + b"{}"), TORN),
    model("weights a folder", folder_instead(WEIGHTS), TORN),
    model("index of numbers", written(INDEX, '{"weight_map": {"a": 5}}'), INDEX, TORN),
    Case("model: a file", (UNUSABLE,), {"model_name_or_path": "@data.jsonl"}),
    model("adapters", adapter, "contains adapters but no model", "adapter_name_or_path"),
    Case("model: no name of the Hub's", (UNUSABLE, "Repo id"), {"model_name_or_path": "what is this?"}),
    Case("model: no such subfolder", (UNUSABLE,), {"model_init_kwargs": '{"subfolder": "nope"}'}),
]

TOKENIZERS = [
    tokenizer("empty", written("tokenizer.json", ""), NO_TOKENIZER),
    tokenizer("absent", without_tokenizer, NO_TOKENIZER),
    tokenizer("binary", written("tokenizer.json", bytes(range(256))), NO_TOKENIZER),
    tokenizer("without its model", changed("tokenizer.json", model=None), NO_TOKENIZER),
    tokenizer("configuration a list", written("tokenizer_config.json", "[]"), NO_TOKENIZER),
    tokenizer("length a word", own(model_max_length="long"), "does not work"),
    tokenizer("an EOS token that it lacks", own(eos_token="<|end|>"), "tokens, but", "vocab_size is"),
    tokenizer("EOS a number", own(eos_token=5), NO_TOKENIZER, "eos_token"),
    template("empty", "", "no chat template"),
    template("half written", "{% for %}", "@data.jsonl, row 1: the chat template", "Expected an expression"),
    template("that refuses", "{{ raise_exception('no') }}", "the chat template", "failed: no;"),
    template("without its filter", "{{ messages | zebra }}", "the chat template", "No filter named 'zebra'"),
    template(
        "that calls itself", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template", "recursion depth"
    ),
]
