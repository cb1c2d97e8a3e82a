"""Private APIs of other libraries are used only in `alignment/internals/`, which imports the libraries on call.

What a syntax tree cannot show stays with the reviewer: names that are computed (``getattr(x, name)``), texts of errors
and of ``str(x)``, and public-looking names that no documentation has.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT

LIBRARIES = ("torch", "deepspeed", "transformers", "peft", "bitsandbytes", "datasets", "accelerate", "tqdm")
LIBRARIES += ("liger_kernel",)
# The modules that their documentation imports from. Whatever else of them is imported is private.
PUBLIC = {
    *LIBRARIES,
    *("torch.distributed", "torch.nn", "torch.nn.functional", "torch.nn.utils", "torch.autograd.function"),
    *("torch.optim", "torch.optim.lr_scheduler", "torch.utils", "torch.utils.checkpoint", "torch.utils.cpp_extension"),
    *("torch.utils.data", "torch.autograd", "torch.backends", "torch.backends.cuda", "torch.cuda", "torch.random"),
    *("torch.version", "torch.overrides", "deepspeed.utils"),
    *("deepspeed.accelerator", "deepspeed.comm", "deepspeed.ops", "deepspeed.ops.adam"),
    *("transformers.integrations", "transformers.trainer_utils", "transformers.utils", "transformers.utils.logging"),
    *("datasets.utils", "tqdm.auto", "peft.tuners.tuners_utils", "transformers.pytorch_utils", "bitsandbytes.nn"),
}
# Private despite their names: attributes that ZeRO-3 adds to parameters; undocumented attributes of engines,
# processors, managers, callbacks and tokenizers.
NAMES = {"ds_id", "ds_status", "ds_numel", "ds_shape", "ds_tensor", "ds_persist", "ds_active_sub_modules"}
NAMES |= {"get_param_coordinator", "parameter_offload", "FWD_MODULE_STACK", "fp16_groups", "fp32_groups"}
NAMES |= {"zero_optimization_partition_weights", "fp16_enabled", "background_thread_status", "fatal_error"}
NAMES |= {"prompt_ignore_length", "supports_continuous_batching", "tb_writer", "CUDA_HOME"}
INTERNALS = ROOT / "alignment" / "internals"
FILES = sorted(path for path in (ROOT / "alignment").rglob("*.py") if INTERNALS not in path.parents)
PYTHONS = (
    {
        name
        for kind in (object, type, types.FunctionType, types.MethodType, types.ModuleType, types.TracebackType)
        for name in dir(kind)
    }
    | {*dir(BaseException), *dir(dict), *dir(builtins), "__version__", "__file__", "__path__", "__dataclass_fields__"}
    | {"__pydantic_config__"}  # documented
    | {"_replace", "_asdict", "_make"}
)  # the last of named tuples


def called(node: ast.AST) -> str:
    """The last part of the name that a node calls; empty if it is not a call."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def is_namespace(node: ast.AST) -> bool:
    """Whether a node is ``vars(x)`` or ``x.__dict__``."""
    return called(node) == "vars" or (isinstance(node, ast.Attribute) and node.attr == "__dict__")


def attributes(node: ast.AST) -> Iterator[str]:
    """The names that a node looks up, sets or deletes on a value, written as an attribute or as a text."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    texts: list[ast.expr] = []
    if isinstance(node, ast.Subscript) and is_namespace(node.value):
        texts = [node.slice]
    elif isinstance(node, ast.Compare) and any(map(is_namespace, node.comparators)):
        texts = [node.left]
    elif isinstance(node, ast.Call):
        name = called(node)
        if name in ("getattr", "hasattr", "setattr", "delattr"):
            texts = node.args[1:2]
        elif name in ("attrgetter", "methodcaller", "getattr_static"):
            texts = node.args
        elif isinstance(node.func, ast.Attribute) and is_namespace(node.func.value):  # vars(x).get(…), .pop(…)
            texts = node.args[:1]
    for text in texts:
        if isinstance(text, ast.Constant):
            yield str(text.value)


def spoken_to(node: ast.AST) -> str | None:
    """The logger that a node asks for by name, or the warning that it filters by message: texts of inner modules."""
    if called(node) not in ("getLogger", "filterwarnings"):
        return None
    assert isinstance(node, ast.Call)
    texts = [argument.value for argument in node.args[:2] if isinstance(argument, ast.Constant)]
    return str(texts[-1]) if texts else None


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
    except ValueError:  # a module in sys.modules without a spec, such as torch.backends.cudnn
        return True


def imported(node: ast.AST) -> Iterator[str]:
    """The modules and names of an import, in full: ``from torch import nn`` gives ``torch`` and ``torch.nn``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def local_names(tree: ast.AST) -> dict[str, str]:
    """What the imports of a file make its names stand for: ``import torch.distributed as dist`` gives ``dist``."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                library = alias.name.partition(".")[0]
                found |= {alias.asname: alias.name} if alias.asname else {library: library}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def dotted(node: ast.AST, names: Mapping[str, str]) -> str:
    """The full name of a chain of attributes such as ``datasets.config.X``; empty if it starts at no import."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute) and (start := dotted(node.value, names)):
        return f"{start}.{node.attr}"
    return ""


def private(name: str) -> bool:
    """Whether a full name is private: a module that is not listed, or anything with an underscore."""
    library, *rest = name.split(".")
    if library not in LIBRARIES or name in PUBLIC:
        return False
    return any(part.startswith("_") for part in rest) or is_module(name)


def touches(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every use of a private API."""
    own, names = own_names() | set(defined(tree)), local_names(tree)
    for node in ast.walk(tree):
        line: int = getattr(node, "lineno", 0)
        yield from ((line, name) for name in imported(node) if private(name))
        chain = dotted(node, names) if isinstance(node, ast.Attribute) else ""
        if chain.partition(".")[0] in LIBRARIES and chain not in PUBLIC and is_module(chain):
            yield line, chain
        if (text := spoken_to(node)) is not None:
            yield line, text
        value = node.value if isinstance(node, ast.Attribute) else None
        of_python = isinstance(value, ast.Name) and value.id in sys.stdlib_module_names  # os._exit
        for name in attributes(node):
            if (name.startswith("_") or name in NAMES) and name not in PYTHONS | own and not of_python:
                yield line, name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_private_api_is_used(path: Path) -> None:
    found = [f"line {line}: {name}" for line, name in touches(ast.parse(path.read_text(encoding="utf-8")))]
    assert not found, "move each to a function of alignment/internals/ that says why it is needed"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import deepspeed.runtime.engine", ["deepspeed.runtime.engine"]),
        ("from transformers.integrations import deepspeed", ["transformers.integrations.deepspeed"]),
        ("norm = hasattr(engine.optimizer, '_global_grad_norm')", ["_global_grad_norm"]),
        ("vars(kind)['_instances'], kind.__dict__['_bars']", ["_instances", "_bars"]),
        ("import datasets\nfolder = datasets.config.HF_DATASETS_CACHE", ["datasets.config"]),
        ("logging.getLogger('ContinuousBatchingLogger')", ["ContinuousBatchingLogger"]),
        ("from torch import nn, Tensor\nimport torch.nn.functional as F\nimport os\nos._exit(1)", []),
        ("super()._prepare_data(), kind.__mro__, torch.__version__, getattr(options, name)", []),
    ],
)
def test_uses_of_private_apis(code: str, found: list[str]) -> None:
    names = [name for _, name in touches(ast.parse(code)) if not name.startswith("deepspeed.runtime.zero.")]
    assert sorted(names) == sorted(found)


def test_internals_import_no_library() -> None:
    modules = sorted(f"alignment.internals.{path.stem}" for path in INTERNALS.glob("*.py"))
    assert len(modules) > 4
    code = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
        f"assert not set({LIBRARIES}) & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
