"""Private APIs of other libraries are touched in `alignment/internals/` only, which imports the libraries on call."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import subprocess
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT

LIBRARIES = ("torch", "deepspeed", "transformers", "peft", "bitsandbytes", "datasets", "accelerate")
# The modules that their documentation imports from. Whatever else of them is imported is private.
PUBLIC = {
    *LIBRARIES,
    *("torch.distributed", "torch.nn", "torch.nn.functional", "torch.nn.utils", "torch.autograd.function"),
    *("torch.optim", "torch.optim.lr_scheduler", "torch.utils", "torch.utils.checkpoint", "torch.utils.cpp_extension"),
    "torch.utils.data",
    *("deepspeed.accelerator", "deepspeed.ops", "deepspeed.ops.adam"),
    *("transformers.integrations", "transformers.trainer_callback", "transformers.trainer_utils"),
    *("transformers.training_args", "transformers.utils", "transformers.utils.logging"),
    "datasets.utils",
}
# Private though their names do not say so: what ZeRO-3 adds to parameters, and what it does with them.
NAMES = {"ds_id", "ds_status", "ds_numel", "ds_shape", "ds_tensor", "ds_persist", "ds_active_sub_modules"}
NAMES |= {"get_param_coordinator", "parameter_offload", "FWD_MODULE_STACK", "fp16_groups", "fp32_groups"}
INTERNALS = ROOT / "alignment" / "internals"
FILES = sorted(path for path in (ROOT / "alignment").rglob("*.py") if INTERNALS not in path.parents)
PYTHONS = (
    {
        name
        for kind in (object, type, types.FunctionType, types.ModuleType, types.TracebackType, BaseException, dict)
        for name in dir(kind)
    }
    | {*dir(builtins), "__version__", "__file__", "__path__"}
    | {"_replace"}
)  # the last of named tuples


def attributes(node: ast.AST) -> str | None:
    """The name that a node looks up, sets or deletes on a value, written as an attribute or as a text."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
        name = node.args[1]
        if node.func.id in ("getattr", "hasattr", "setattr", "delattr") and isinstance(name, ast.Constant):
            return str(name.value)
    return None


def defined(tree: ast.AST) -> Iterator[str]:
    """Names of functions, classes and variables, and of what is set on ``self`` or ``cls``."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr


@cache
def own_names() -> frozenset[str]:
    return frozenset(name for path in FILES for name in defined(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def imported(node: ast.AST) -> Iterator[str]:
    """The modules and names of an import, in full: ``from torch import nn`` gives ``torch`` and ``torch.nn``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def private(name: str) -> bool:
    """Whether a full name is private: a module that is not listed, or anything with an underscore."""
    library, *rest = name.split(".")
    if library not in LIBRARIES or name in PUBLIC:
        return False
    return any(part.startswith("_") for part in rest) or is_module(name)


def touches(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every touch of a private API."""
    own = own_names() | set(defined(tree))
    for node in ast.walk(tree):
        for name in imported(node):
            if private(name):
                yield node.lineno, name  # type: ignore[attr-defined]
        name = attributes(node)
        if name is None or name in PYTHONS or not (name.startswith("_") or name in NAMES):
            continue
        value = node.value if isinstance(node, ast.Attribute) else None
        of_python = isinstance(value, ast.Name) and value.id in sys.stdlib_module_names  # os._exit
        if name not in own and not of_python:
            yield node.lineno, name  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_private_api_is_touched(path: Path) -> None:
    found = [f"line {line}: {name}" for line, name in touches(ast.parse(path.read_text(encoding="utf-8")))]
    assert not found, "move each to a function of alignment/internals/ that says why it is needed"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from deepspeed.runtime.zero import parameter_offload", ["deepspeed.runtime.zero"]),
        ("import deepspeed.runtime.engine", ["deepspeed.runtime.engine"]),
        ("from transformers.integrations import deepspeed", ["transformers.integrations.deepspeed"]),
        ("from transformers.utils.generic import ModelOutput", ["transformers.utils.generic"]),
        ("from torch.distributed import distributed_c10d as c", ["torch.distributed.distributed_c10d"]),
        ("from torch import _dynamo", ["torch._dynamo"]),
        ("from torch.nn.utils import _stateless", ["torch.nn.utils._stateless"]),
        ("norm = hasattr(engine.optimizer, '_global_grad_norm')", ["_global_grad_norm"]),
        ("model.config._attn_implementation = 'sdpa'", ["_attn_implementation"]),
        ("deepspeed.ops.__compatible_ops__['a'] = False", ["__compatible_ops__"]),
        ("del module._forward_hooks", ["_forward_hooks"]),
        ("parameter.ds_status", ["ds_status"]),
        ("torch._C._cuda_init()", ["_C", "_cuda_init"]),
    ],
)
def test_what_is_a_touch(code: str, found: list[str]) -> None:
    names = [name for _, name in touches(ast.parse(code)) if not name.startswith("deepspeed.runtime.zero.")]
    assert sorted(names) == sorted(found)


@pytest.mark.parametrize(
    "code",
    [
        "from torch import nn, Tensor\nimport torch.nn.functional as F\nfrom deepspeed import accelerator",
        "from transformers import AutoModel\nfrom transformers.utils import logging\nimport os\nos._exit(1)",
        "class A:\n    def __init__(self):\n        self._own = 1\n    def f(self, other):\n        return other._own",
        "super()._prepare_models()",  # a method of the package
        "kind.__name__, kind.__mro__, kind.__subclasses__(), torch.__version__, error.__traceback__",
        "getattr(options, 'learning_rate'), getattr(options, name)",
    ],
)
def test_what_is_not(code: str) -> None:
    assert list(touches(ast.parse(code))) == []


def test_internals_import_no_library() -> None:
    modules = sorted(f"alignment.internals.{path.stem}" for path in INTERNALS.glob("*.py"))
    assert len(modules) > 4
    code = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
        f"assert not set({LIBRARIES}) & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
