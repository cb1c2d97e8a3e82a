"""Every option has an effect: it is read, or shown here to change the resulting configuration."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from alignment.compat.trl.verdicts import judged_names
from alignment.config import dtypes
from alignment.config.errors import OptionError
from alignment.config.options import AlignmentConfig
from alignment.config.registry import METHODS, option_names
from tools.documentation.options import option_tables

OBJECTS = ("args", "options", "limits")  # what the package calls an options object

# Options that act through the configuration, with a value that must change what it produces. Those that nothing
# outside of it reads have to be here; the others are here because being read is not yet having an effect.
PROBES: dict[str, Any] = {
    "bf16": True,
    "fp16": True,
    "dtype": "bfloat16",
    "max_grad_norm": 0.5,
    "per_device_train_batch_size": 3,
    "per_device_eval_batch_size": 3,
    "gradient_accumulation_steps": 3,
    "ref_placement": "sharded",
    "deepspeed": {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 7}},
    "ref_deepspeed": "ref_sharded",
    "precompute_ref_log_probs": True,  # another name of a placement
    "warmup_ratio": 0.1,
    "warmup_steps": 7,
}
WITH_REFERENCE = ("kto", "dpo", "online_dpo")
# Read by transformers' DefaultFlowCallback and TrainerState; test_callbacks.py and test_intervals.py show the effect.
READ_BY_TRANSFORMERS = {
    "logging_first_step", "logging_strategy", "eval_delay", "logging_steps", "eval_steps", "save_steps",
}  # fmt: skip
# Other ways to set an option, read where that is resolved; test_config_options.py shows the effect.
READ_INTO_OTHERS = {
    "padding_free", "gamma_beta_ratio", "use_transformers_paged", "loss_weights", "use_vllm", "vllm_server_base_url",
    "vllm_server_host", "vllm_server_port",
}  # fmt: skip
# Passed on to the formulas of losses; test_dpo.py and test_objectives.py show the effect.
READ_BY_LOSSES = {
    name for cls in METHODS.values() for loss in getattr(cls, "LOSSES", {}).values() for name in loss.reads
}


def field_id(value: Any) -> str:
    """The name of a field or of a method's class, for test names."""
    return str(getattr(value, "name", None) or getattr(value, "method", value))


def attributes_read(package: Path) -> set[str]:
    """Return the attributes of options objects that the package reads outside of ``config``."""
    names = set()
    for file in package.rglob("*.py"):
        if file.relative_to(package).parts[0] == "config":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_options(node.value):
                names.add(node.attr)
    return names


def _is_options(node: ast.expr) -> bool:
    """Whether an expression is ``options`` or ``args``, or such an attribute: ``self.args``."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
    return name in OBJECTS


READ = attributes_read(ROOT / "alignment") | READ_BY_TRANSFORMERS | READ_INTO_OTHERS | READ_BY_LOSSES


def unaccounted(cls: type[AlignmentConfig]) -> set[str]:
    """Return the fields that are neither read nor probed, and have no verdict."""
    return own_names(cls) - READ - PROBES.keys()


def own_names(cls: type[AlignmentConfig]) -> frozenset[str]:
    """Return the options of a class without those that only docs/reference/trl-options.md lists."""
    return option_names(cls) - judged_names(cls)


def produced(options: AlignmentConfig) -> tuple[Any, ...]:
    """Return what options determine: dtype plan, DeepSpeed JSON and placement, warmup steps, and properties."""
    from support.helpers import tiny_config

    from alignment.models.source import ModelSource
    from alignment.planning.engines import plan_engines

    model = ModelSource("model", None, tiny_config("tied"), {})
    plan = plan_engines(options, model, model if options.method in WITH_REFERENCE else None)
    warmup = options.get_warmup_steps(100)
    return plan, warmup, options.eval_batch_size, options.resolved_bf16, options.resolved_fp16


@pytest.mark.parametrize("cls", METHODS.values(), ids=field_id)
def test_every_option_is_read_or_probed(cls: type[AlignmentConfig]) -> None:
    assert unaccounted(cls) == set()


PROBED = [(cls, name) for cls in METHODS.values() for name in PROBES if name in option_names(cls)]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("cls", "name"), PROBED, ids=field_id)
def test_probed_options_change_the_result(
    cls: type[AlignmentConfig], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtypes, "_check_fp16_supported", lambda source: None)  # a CPU has none
    if cls.method not in WITH_REFERENCE and name.startswith("ref_"):
        with pytest.raises(OptionError, match=f"^{name}=.* does not use a reference model"):
            cls("out", **{name: PROBES[name]})
        return
    assert produced(cls("out", use_cpu=True)) == produced(cls("out", use_cpu=True)), "the comparison is by value"
    assert produced(cls("out", use_cpu=True, **{name: PROBES[name]})) != produced(cls("out", use_cpu=True))


def test_documented_options_match_the_classes() -> None:
    shown = set(re.findall(r"^\| `(\w+)` \| ", "\n".join(option_tables()), re.MULTILINE))
    assert shown == set().union(*map(own_names, METHODS.values()))
