"""Settings of ``accelerate launch`` agree with the options, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignment.config.errors import OptionError
from alignment.methods.cpo_options import CPOConfig

LAUNCHED = {"ACCELERATE_CONFIG_DS_FIELDS": "zero_stage", "ACCELERATE_USE_DEEPSPEED": "true"}


def options(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], **given: Any) -> CPOConfig:
    for name, value in {"DS_ACCELERATOR": "cpu", **environment}.items():
        monkeypatch.setenv(name if name[0] != "_" else f"ACCELERATE{name}", value)
    return CPOConfig("out", **given)


@pytest.mark.parametrize(
    ("environment", "given"),
    [
        ({"_DEEPSPEED_ZERO_STAGE": "2", "_MIXED_PRECISION": "no", "_GRADIENT_CLIPPING": "1.0"}, {}),
        ({"_DEEPSPEED_ZERO_STAGE": "3", "_MIXED_PRECISION": "bf16"}, {"deepspeed": "zero3", "bf16": True}),
        ({"_GRADIENT_ACCUMULATION_STEPS": "4"}, {"gradient_accumulation_steps": 4}),
        ({"_DYNAMO_BACKEND": "NO", "_USE_CPU": "True", "_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none"}, {"use_cpu": True}),
    ],
)
def test_settings_that_agree(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], given: dict[str, Any]
) -> None:
    found = options(monkeypatch, LAUNCHED | environment, **given)
    assert {name: getattr(found, name) for name in given} == given


def test_accelerates_deepspeed_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    environment = LAUNCHED | {"_DEEPSPEED_CONFIG_FILE": str(file)}
    assert options(monkeypatch, environment, deepspeed=str(file)).deepspeed == str(file)
    with pytest.raises(OptionError, match="^ACCELERATE_DEEPSPEED_CONFIG_FILE=.*deepspeed='zero2'; set deepspeed to"):
        CPOConfig("out", deepspeed="zero2")


def test_variables_set_by_libraries_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"ACCELERATE_USE_DEEPSPEED": "true", "_DEEPSPEED_ZERO_STAGE": "3", "_MIXED_PRECISION": "fp16"}
    found = options(monkeypatch, environment)
    assert found.deepspeed is None and found.fp16 is None


@pytest.mark.parametrize(
    ("name", "value", "given", "said"),
    [
        ("DEEPSPEED_ZERO_STAGE", "3", {"deepspeed": "zero2"}, "='3' .*deepspeed='zero2'; .*stage=3"),
        ("DEEPSPEED_ZERO_STAGE", "three", {}, "='three' .*deepspeed"),
        ("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu", {"deepspeed": "zero2"}, "='cpu' .*offload_optimizer.device=cpu"),
        ("GRADIENT_ACCUMULATION_STEPS", "4", {}, "='4' .*set gradient_accumulation_steps: 4"),
        ("GRADIENT_CLIPPING", "0.5", {}, "='0.5' .*set max_grad_norm: 0.5"),
        ("MIXED_PRECISION", "bf16", {"fp16": True}, "='bf16' .*set bf16: true"),
        ("MIXED_PRECISION", "fp16", {"bf16": False}, "='fp16' .*set fp16: true"),
        ("MIXED_PRECISION", "fp8", {}, "='fp8' .*bf16"),
        ("USE_FSDP", "true", {}, "='true' .*set deepspeed"),
        ("DYNAMO_BACKEND", "INDUCTOR", {}, "='INDUCTOR' .*not supported"),
    ],
)
def test_settings_that_differ(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(OptionError, match=f"ACCELERATE_{name}{said}"):
        options(monkeypatch, LAUNCHED | {f"ACCELERATE_{name}": value}, **given)
