"""Model cards: every value shown as it is and as nothing else, nothing secret, no folders of the machine."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment.checkpoint import card as card_module
from alignment.checkpoint.manifest import Manifest
from alignment.reporting.model_card import ModelCard, escaped, hub_id, is_secret, public

MARKUP = [
    "<script>alert(1)</script> [click](javascript:alert) ![](x)",
    "**bold** `code` ~~gone~~ $x$ a | b || c",
    "_start and end_ __init__",
    "@someone #1 &lt; \\ {{ x }}",
]


@pytest.mark.parametrize("text", MARKUP)
def test_a_value_has_no_meaning_in_markdown(text: str) -> None:
    found = escaped(text)
    left = found
    for character in set(text):
        left = left.replace(f"&#{ord(character)};", "")
    assert html.unescape(found) == text, "escaped once"
    assert not set("<>[]*`|~$@\\{}") & set(left) and not left.startswith("_") and "&" not in left.replace("&#", "")


def test_lines_addresses_and_length() -> None:
    assert escaped("one\n\n# two\r\n---") == "one &#35; two ---" and escaped("a\u202eb\x00c") == "abc"
    assert "https://" not in escaped("see https://evil.example") and "www." not in escaped("www.evil.example")
    assert len(escaped("x" * 900)) == 200


def test_names() -> None:
    assert all(map(is_secret, ("hub_token", "api_key", "judge_api_key", "password", "client_secret")))
    assert not any(map(is_secret, ("eos_token", "missing_eos_penalty", "num_tokens")))
    assert [hub_id(name) for name in ("org/name", "gpt2", "./org/name", "a/b/c", "o/na me")] == [
        "org/name",
        *[None] * 4,
    ]


def test_metadata_is_yaml_whatever_is_in_it() -> None:
    text = ModelCard(title="x", base_id="a/b", method="evil: [1]\n---", datasets=["o/d: x"]).text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["tags"] == ["deepspeed-alignment"] and head["datasets"] == ["o/d: x"] and head["base_model"] == "a/b"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/home/me/data/rows.jsonl", "rows.jsonl"),
        ("~/models/tiny/", "tiny"),
        ("/home/me/my data/a b.jsonl", "a b.jsonl"),
        ("file:///home/me/x", "x"),
        ("/home/me/rewards.py:length", "rewards.py:length"),
        ("on 8 rows (/home/me/x.jsonl): 0.1", "on 8 rows (x.jsonl): 0.1"),
        ("trl-lib/kto", "trl-lib/kto"),
        ({"path": "/a/b", "token": "x", "pad_token": "p"}, {"path": "b", "pad_token": "p"}),
        ([{"hub_token": "x", "n": 3}], [{"n": 3}]),
        ("key hf_abcdefghijkl", "key ‹hidden›"),
        ("https://me:pass@host/x", "https://‹hidden›host/x"),
    ],
)
def test_what_may_be_published(value: Any, expected: Any) -> None:
    assert public(value) == expected


# From a run's folder -------------------------------------------------------------------------------------------------


def run_folder(root: Path, **options: Any) -> Path:
    """What a run leaves, without weights."""
    checkpoint = root / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    history = [
        {"loss": 0.5, "step": 4, "epoch": 2.0, "learning_rate": 1e-3, "val/contain_eos_token": 1.0},
        {"eval_a_loss": 0.4, "step": 4},
        {"eval_loss": 0.3, "step": 4},
        {"loss": 9.0, "step": 6},
    ]
    state = {"global_step": 4, "epoch": 2.0, "log_history": history}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    (root / "options.json").write_text(json.dumps(options))
    start = {
        "event": "start",
        "steps": 6,
        "window": 8,
        "rows": 30,
        "dropped": {"empty <b>": 2},
        "versions": {"x": "1"},
    }
    lines = [{"event": "start", "steps": 99}, start, {"loss": 9.0, "step": 6}, {"event": "end"}]
    (root / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    return checkpoint


def card_of(source: Path, is_classifier: bool = False) -> str:
    return card_module.card_of(source, title="out", is_classifier=is_classifier, base=None, export=["e"]).text()


def test_a_run(tmp_path: Path) -> None:
    options = {
        "method": "dpo", "loss_type": "ipo", "beta": 0.3, "learning_rate": 1e-6, "dataset_name": "/secret/place/a.csv",
        "output_dir": "/secret/place", "model_name_or_path": "/secret/base", "judge_api_key": "hidden",
        "save_steps": 7, "model_init_kwargs": {"token": "abc", "x": 1},
    }  # fmt: skip
    source = run_folder(tmp_path / "run", **options)
    Manifest("x", 4, "dpo", 2, 0, 16, 50, True, {"torch": "1.2"}, {}, {}, {}).write(source)
    text = card_of(source)
    assert "2305.18290" in text and "2310.12036" in text and "trained from base" in text and "- dpo\n" in text
    facts = (
        "dataset: a.csv",
        "rows: 30",
        "steps: 4",
        "planned steps: 50",
        "rows per step: 16",
        "ranks: 2",
        "torch: 1.2",
    )
    assert all(f"- {fact}\n" in text for fact in facts) and "9" not in text.partition("## Results")[2]
    rows = {"a_loss", "val/contain_eos_token", "beta"}  # neither metric is a secret
    assert all(f"| {row} " in text for row in rows) and "save_steps" not in text
    assert not [word for word in ("judge_api_key", "hidden", "abc", "secret") if word in text]


def test_code_from_outside_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass T: config_class = None\n")
    text = card_of(run_folder(tmp_path / "run", method=f"{tmp_path / 'evil.py'}:T", beta=0.3))
    assert not (tmp_path / "ran").exists() and "evil.py:T" in text and str(tmp_path) not in text and "| beta" in text


def test_the_weights_of_the_best_step_have_its_metrics(tmp_path: Path) -> None:
    source = run_folder(tmp_path / "run", method="sft", load_best_model_at_end=True)
    state = json.loads((source / "trainer_state.json").read_text()) | {"global_step": 6, "best_global_step": 4}
    (tmp_path / "run" / "trainer_state.json").write_text(json.dumps(state))
    for folder in (source, tmp_path / "run"):
        assert "Of step 4" in card_of(folder) and "0.5" in card_of(folder).partition("## Results")[2]


def test_a_local_name_is_none_of_the_hub(tmp_path: Path) -> None:
    source = run_folder(tmp_path / "work" / "run", dataset_mixture={"org/data": 1.0, "data/mine": 2.0, "x/y.jsonl": 1})
    (tmp_path / "work" / "data" / "mine").mkdir(parents=True)
    text = card_of(source)
    assert yaml.safe_load(text.split("---")[1])["datasets"] == ["org/data"]
    assert "- dataset: data/mine\n" in text
