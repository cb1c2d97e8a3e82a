"""Settings of Accelerate's launcher set options, or contradict them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignment.config.deepspeed import load_deepspeed_config, policy_config
from alignment.config.dtypes import plan_dtypes
from alignment.config.errors import OptionError
from alignment.config.translated.accelerate import notes
from alignment.methods.cpo_options import CPOConfig

LAUNCHED = {"ACCELERATE_CONFIG_DS_FIELDS": "zero_stage", "ACCELERATE_USE_DEEPSPEED": "true"}
STAGE, FILE = "ACCELERATE_DEEPSPEED_ZERO_STAGE", "ACCELERATE_DEEPSPEED_CONFIG_FILE"


def options(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], **given: Any) -> CPOConfig:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return CPOConfig("out", **given)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_engine_matches_accelerates_settings(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    environment = LAUNCHED | {STAGE: str(stage), "ACCELERATE_MIXED_PRECISION": "bf16"}
    offload = {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"} if stage == 3 else {}
    found = options(monkeypatch, environment | offload, max_grad_norm=1.0)
    base = load_deepspeed_config(found.deepspeed, "zero2")
    made = policy_config(found, base, plan_dtypes(found, base), 1, 64)
    assert made["zero_optimization"]["stage"] == stage and made["bf16"]["enabled"]
    assert made["zero_optimization"].get("offload_param", {}).get("device") == ("cpu" if stage == 3 else None)
    before = found.to_dict()
    found.__post_init__()
    assert found.to_dict() == before
    said = f"accelerate launch: {STAGE}='{stage}'"
    assert notes(found)[0].startswith(said) and notes(found)[0].endswith(f"sets deepspeed='ZeRO-{stage}', bf16=True")


def test_accelerates_deepspeed_file_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    section = {"type": "AdamW", "params": {"lr": 0.25}}
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}, "optimizer": section}))
    found = options(monkeypatch, LAUNCHED | {FILE: str(file)})
    assert (found.deepspeed, found.learning_rate) == (str(file), 0.25)
    with pytest.raises(OptionError, match=f"^{FILE}=.* contradicts the option deepspeed='zero2'"):
        CPOConfig("out", deepspeed="zero2")


def test_variables_set_by_libraries_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    found = options(
        monkeypatch, {"ACCELERATE_USE_DEEPSPEED": "true", STAGE: "3", "ACCELERATE_MIXED_PRECISION": "fp16"}
    )
    assert found.deepspeed is None and found.fp16 is None and notes(found) == []


def test_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "no"}
    found = options(monkeypatch, environment)
    assert found.use_cpu and found.bf16 is None and found.deepspeed is None and "USE_CPU='True'" in notes(found)[0]


@pytest.mark.parametrize(
    ("name", "value", "given", "said"),
    [
        ("DEEPSPEED_ZERO_STAGE", "3", {"deepspeed": "zero2"}, "=3 .*contradicts .*deepspeed='zero2'.*stage=2"),
        ("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu", {"deepspeed": "zero2"}, "='cpu' .*contradicts .*device=None"),
        ("GRADIENT_ACCUMULATION_STEPS", "4", {}, "=4 .*contradicts .*gradient_accumulation_steps=1"),
        ("GRADIENT_CLIPPING", "0.5", {}, "=0.5 .*contradicts .*max_grad_norm=1.0"),
        ("MIXED_PRECISION", "bf16", {"fp16": True}, "='bf16' .*fp16=True"),
        ("MIXED_PRECISION", "fp16", {"bf16": False}, "='fp16' .*bf16=False"),
        ("MIXED_PRECISION", "fp8", {}, "='fp8'.* set bf16, fp16 or no"),
        ("USE_FSDP", "true", {}, "='true' .*only DeepSpeed is supported"),
        ("DYNAMO_BACKEND", "INDUCTOR", {}, "='INDUCTOR' .*torch.compile is not supported"),
        ("DEEPSPEED_ZERO_STAGE", "4", {}, "=4 .*set 0, 1, 2 or 3"),
        ("DEEPSPEED_ZERO_STAGE", "three", {}, "='three'.* a number"),
    ],
)
def test_contradictions(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(OptionError, match=f"ACCELERATE_{name}{said}"):
        options(monkeypatch, LAUNCHED | {f"ACCELERATE_{name}": value}, **given)
