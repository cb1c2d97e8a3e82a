"""Imports that leave something out: what is there afterwards is what a plain import gives. In a process of its own."""

from __future__ import annotations

import subprocess
import sys

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


def check(code: str) -> None:
    """Run ``code`` after the libraries were imported."""
    command = [sys.executable, "-c", START + code]
    done = subprocess.run(command, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr


def test_transformers_is_as_it_is_by_itself() -> None:
    check("""
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

# Without peft no model is one of its own; whoever asks for its classes gets them.
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
""")


def test_muon_is_compiled_when_it_is_used() -> None:
    check("""
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
""")


def test_what_is_imported_already_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero.muon import original_muon
    from transformers import models, trainer_utils

    before = [dict(vars(module)) for module in (original_muon, models, trainer_utils)]
    import_muon()
    transformers_start.import_model_index()
    transformers_start.import_trainer_utils()
    assert before == [dict(vars(module)) for module in (original_muon, models, trainer_utils)]
