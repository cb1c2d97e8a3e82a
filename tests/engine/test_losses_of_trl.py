"""Losses of rows in every format match TRL's to 1e-5, except where docs/guides/coming-from-trl.md says otherwise."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import losses_of_trl
from support.losses_of_trl import PAIRS, loss_of_ours

from alignment.objectives.dpo import LOSSES as LOSSES_OF_DPO
from tools.trl.hub import rows
from tools.trl.hub.tokenizers import FAMILIES, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed"),
]

# Tokenizers with and without BOS, a template, a pad token of its own, and text behind the end of a turn.
ARCHITECTURES = {
    "qwen": "Qwen2",
    "llama3": "Llama",
    "mistral": "Mistral",
    "gemma": "Gemma",
    "neox": "GPTNeoX",
    "phi3": "Phi3",
}
WITHOUT_TEMPLATE = ("neox",)
CONTINUE = ("qwen", "gemma", "phi3")  # their templates write a newline behind the end of a turn
BEGIN_WITH_BOS = ("llama3", "mistral", "gemma")
BEGIN_WITHOUT_BOS = ("neox", "phi3")  # they have the token, and do not put it before texts
CHATS = ("conversational", "tools")
PAIRED = ("standard", "implicit", "conversational", "conversational_implicit", "tools")
KINDS = {
    "kto": ("standard", "conversational", "tools", *(f"paired_{kind}" for kind in PAIRED)),
    "dpo": PAIRED,
    "cpo": PAIRED,
    "reward": PAIRED,
    "sft": ("text", "standard", "messages", "conversational", "tools"),
    "online_dpo": ("standard", "conversational"),
}
SMOOTHED = {"label_smoothing": 0.1}
LOSSES: dict[str, list[dict[str, Any]]] = {
    "kto": [{"loss_type": "apo_zero_unpaired"}],
    "dpo": [
        *({"loss_type": name, **(SMOOTHED if name in ("robust", "exo_pair") else {})} for name in LOSSES_OF_DPO),
        {"loss_type": "exo_pair", "label_smoothing": 0.001},
        {"loss_type": "discopop", "discopop_tau": 0.5},
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        {"loss_type": ["robust", "sigmoid_norm"], **SMOOTHED},
        {"loss_type": "sigmoid", **SMOOTHED},
    ],
    "cpo": [{"loss_type": "hinge"}, {"loss_type": "ipo"}, {"loss_type": "simpo"}],
    "online_dpo": [{"loss_type": "ipo"}],
}


def of_chats(kind: str) -> bool:
    return kind == "messages" or any(part in kind for part in CHATS)


def jobs() -> list[dict[str, Any]]:
    """Every format with every family, and every further loss on one of them."""
    found = []
    for family in ARCHITECTURES:
        for method, kinds in KINDS.items():
            for kind in kinds:
                if family in WITHOUT_TEMPLATE and of_chats(kind):
                    continue
                further = LOSSES.get(method, []) if (family, kind) == ("phi3", "standard") else []
                for options in ({}, *further):
                    values = (re.sub(r"[^\w.]+", "+", str(value)).strip("+") for value in options.values())
                    name = "-".join((method, kind, family, *values))
                    found.append({"name": name, "method": method, "kind": kind, "family": family, "options": options})
    return found


JOBS = jobs()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose predictions are far from even, so that a token more or less is seen."""
    folder = tmp_path_factory.mktemp("models")
    for family in ARCHITECTURES:
        for seed, part in enumerate(("policy", "reference", "reward")):
            _model(family, seed, part == "reward", folder / f"{family}-{part}")
    return folder


def _model(family: str, seed: int, classifies: bool, folder: Path) -> None:
    kind = FAMILIES[family]
    # transformers' classifiers read the last token that does not pad: another test is about those whose EOS pads.
    pad = "<pad>" if kind.pad in (None, kind.eos) else kind.pad
    tokenizer = train(dataclasses.replace(kind, pad=pad), [*rows.texts(), *(text for row in PAIRS for text in row)])
    name = ARCHITECTURES[family] + ("ForSequenceClassification" if classifies else "ForCausalLM")
    cls = getattr(transformers, name)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2} | ({"head_dim": 8} if family == "gemma" else {})
    ids = {f"{part}_token_id": getattr(tokenizer, f"{part}_token_id") for part in ("bos", "eos", "pad")}
    config = cls.config_class(vocab_size=len(tokenizer), **sizes, **ids, **({"num_labels": 1} if classifies else {}))
    torch.manual_seed(seed)
    model = cls(config).float()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.25)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def theirs(
    models: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """TRL's losses of the jobs that are tested, by their names; a text where TRL failed."""
    given = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = {params["job"]["name"] for params in given if params.get("job") in JOBS}
    folder = tmp_path_factory.mktemp("trl")
    for job in JOBS:
        part = "reward" if job["method"] == "reward" else "policy"
        job |= {
            "model": str(models / f"{job['family']}-{part}"),
            "reference": str(models / f"{job['family']}-reference"),
        }
    (folder / "jobs.json").write_text(json.dumps([job for job in JOBS if job["name"] in chosen]))
    script = Path(losses_of_trl.__file__)
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    command = [sys.executable, str(script), str(folder / "jobs.json"), str(folder / "losses.json")]
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    assert done.returncode == 0, (folder / "log").read_text()[-5000:]
    yield json.loads((folder / "losses.json").read_text())


def difference(job: dict[str, Any]) -> str | None:
    """The row of docs/guides/coming-from-trl.md that a job's losses differ by; None where they must not."""
    method, kind, family = job["method"], job["kind"], job["family"]
    if method == "dpo" and job["options"] == {"loss_type": "sigmoid", **SMOOTHED}:
        return "the sigmoid loss of TRL 1.16 ignores label_smoothing"
    if method == "cpo" and kind == "tools" and family != "mistral":  # its template has no place for them
        return "CPO leaves the tools of a row aside"
    if method == "cpo" and family in BEGIN_WITHOUT_BOS and not of_chats(kind):
        return "CPO puts BOS before a text whatever the tokenizer does"
    if method == "online_dpo" and family in BEGIN_WITH_BOS and kind == "standard":
        return "Online DPO leaves out the BOS of a prompt that is a text"
    if family in CONTINUE and of_chats(kind) and method not in ("reward", "online_dpo"):
        return "an answer ends at the end-of-turn token"
    return None


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["name"])
def test_loss(job: dict[str, Any], theirs: dict[str, Any], tmp_path: Path) -> None:
    expected = theirs[job["name"]]
    assert isinstance(expected, float), expected
    found = loss_of_ours(job, str(tmp_path))
    reason = difference(job)
    if reason is None:
        assert found == pytest.approx(expected, abs=1e-5, rel=1e-6)
    else:
        assert abs(found - expected) > 1e-4, f"no difference any more: {reason}"
