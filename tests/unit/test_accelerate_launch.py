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
        ({"_DEEPSPEED_ZERO_STAGE": "2", "_MIXED_PRECISION": "no", "_GRADIENT_CLIPPING": "1"}, {}),
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
    with pytest.raises(
        OptionError, match="ACCELERATE_DEEPSPEED_CONFIG_FILE=.* does not agree with the option deepspeed"
    ):
        CPOConfig("out", deepspeed="zero2")


def test_variables_set_by_libraries_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"ACCELERATE_USE_DEEPSPEED": "true", "_DEEPSPEED_ZERO_STAGE": "3", "_MIXED_PRECISION": "fp16"}
    found = options(monkeypatch, environment)
    assert found.deepspeed is None and found.fp16 is None


@pytest.mark.parametrize(
    ("name", "value", "given", "option"),
    [
        ("DEEPSPEED_ZERO_STAGE", "3", {"deepspeed": "zero2"}, "deepspeed"),
        ("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu", {"deepspeed": "zero2"}, "deepspeed"),
        ("GRADIENT_ACCUMULATION_STEPS", "4", {}, "gradient_accumulation_steps"),
        ("GRADIENT_CLIPPING", "0.5", {}, "max_grad_norm"),
        ("MIXED_PRECISION", "bf16", {"fp16": True}, "bf16 or fp16"),
        ("MIXED_PRECISION", "fp8", {}, "bf16 or fp16"),
        ("USE_FSDP", "true", {}, "deepspeed"),
        ("DYNAMO_BACKEND", "INDUCTOR", {}, "deepspeed"),
    ],
)
def test_settings_that_differ(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, given: dict[str, Any], option: str
) -> None:
    said = f"ACCELERATE_{name}='{value}' does not agree with the option {option}"
    with pytest.raises(OptionError, match=said):
        options(monkeypatch, LAUNCHED | {f"ACCELERATE_{name}": value}, **given)
