"""Imports that skip modules have the same result as plain imports. In a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from alignment.internals import transformers_start
from alignment.internals.deepspeed import import_muon
from tools.ranks.client import environment

START = """
import sys
from unittest import mock
from alignment.engines.start_up import import_libraries
import_libraries()
"""
MUON = """
import torch
from deepspeed.runtime import compiler
from deepspeed.runtime.zero.muon import original_muon
assert "torch._inductor.compile_fx" not in sys.modules
assert compiler.compile() is torch.compile
calls = []
def compile(function):
    calls.append(function)
    return function
steps = original_muon.zeropower_via_newtonschulz5
weights = torch.eye(2)
with mock.patch.object(torch, "compile", compile):
    first, second = steps(weights, 1), steps(weights, steps=1)
assert calls == [steps.__wrapped__] and torch.equal(first, second)
import deepspeed.runtime.zero.muon.muon_optimizer
"""
TRANSFORMERS = """
import gc
assert gc.isenabled() and "peft" not in sys.modules

# The index of the models.
import transformers.models as models
from transformers.utils import import_utils
import_utils.define_import_structure.cache_clear()
read = import_utils.define_import_structure(models.__file__)
plain = import_utils._LazyModule(models.__name__, models.__file__, read)
assert len(plain._class_to_module) > 1000
for name in ("_class_to_module", "_modules", "_object_missing_backend"):
    assert getattr(plain, name) == getattr(models, name), name
assert sorted(plain.__all__) == sorted(models.__all__)
assert {k: set(v) for k, v in plain._import_structure.items()} == {
    k: set(v) for k, v in models._import_structure.items()
}

# Without peft no model is one of its own; code that accesses its classes gets them.
from torch import nn
from transformers import trainer_utils, utils
assert trainer_utils._is_peft_model(nn.Linear(1, 1)) is False
assert "peft" not in sys.modules
holders = [
    name
    for name, module in sys.modules.items()
    if name.startswith("transformers.")
    and vars(module).get("is_peft_available", utils.is_peft_available) is not utils.is_peft_available
]
assert holders == ["transformers.trainer_utils"], holders
try:
    trainer_utils.NoSuchName
except AttributeError as error:
    assert str(error) == "module 'transformers.trainer_utils' has no attribute 'NoSuchName'"
from types import SimpleNamespace
with mock.patch.dict(sys.modules, peft=SimpleNamespace(PeftModel=1)):  # a thread that has not finished importing it
    assert trainer_utils._is_peft_model(nn.Linear(1, 1)) is False and "PeftModel" not in vars(trainer_utils)
from transformers.trainer_utils import PeftModel
import peft
assert PeftModel is peft.PeftModel

# With it, they are told apart, and nothing of ours is left.
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
adapted = peft.get_peft_model(Net(), peft.LoraConfig(target_modules=["inner"], r=1))
assert trainer_utils._is_peft_model(adapted) and not trainer_utils._is_peft_model(Net())
assert trainer_utils.unwrap_peft_model(adapted) is adapted.get_base_model()
assert trainer_utils.is_peft_available is utils.is_peft_available
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import TrainerCallback as same
assert TrainerCallback is same
"""
PATHS = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def run(code: str) -> None:
    """Run ``code`` in a process of its own."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(PYTHONPATH=PATHS), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr


@pytest.mark.ci
def test_muon_is_compiled_on_first_use_and_transformers_is_the_same_as_by_a_plain_import() -> None:
    """In this order: peft, which the second part imports, compiles as well."""
    run(START + MUON + TRANSFORMERS)


def test_the_files_of_the_models_are_read_once() -> None:
    code = """
import sys, transformers
from alignment.internals.transformers_start import import_model_index
from transformers.utils import import_utils
reads = import_utils.define_import_structure.cache_info
assert "transformers.models" not in sys.modules
before = reads().misses
import_model_index()
assert "transformers.models" in sys.modules and reads().misses == before
del sys.modules["transformers.models"]
import transformers.models
assert reads().misses == before + 1, "by itself it is read again"
"""
    run(code)


def test_a_moved_muon_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start must not fail if a release has moved something: it may only take longer."""
    from deepspeed.runtime import compiler

    for name in ("deepspeed.no.such.package", "deepspeed.no_such_module"):
        monkeypatch.setattr("alignment.internals.deepspeed._MUON", name)
        import_muon()
    (tmp_path / "decorated_otherwise.py").write_text(
        "from deepspeed.runtime import compiler\n"
        "def function(*given, **named): return given, named\n"
        "plain, with_arguments = compiler.compile()(function), compiler.compile('later', dynamic=True)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("alignment.internals.deepspeed._MUON", "decorated_otherwise")
    monkeypatch.setattr(compiler, "compile", lambda *args, **kwargs: (args, kwargs))
    import_muon()
    made = sys.modules.pop("decorated_otherwise")
    assert made.plain.__wrapped__ is made.function
    assert made.with_arguments == (("later",), {"dynamic": True})
    compiled: list[Any] = []
    monkeypatch.setattr("torch.compile", lambda function: compiled.append(function) or function)
    assert [made.plain(1, b=2), made.plain()] == [((1,), {"b": 2}), ((), {})] and compiled == [made.function]


def test_imported_modules_are_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero.muon import original_muon
    from transformers import models, trainer_utils

    before = [dict(vars(module)) for module in (original_muon, models, trainer_utils)]
    import_muon()
    transformers_start.import_model_index()
    transformers_start.import_trainer_utils()
    assert before == [dict(vars(module)) for module in (original_muon, models, trainer_utils)]
