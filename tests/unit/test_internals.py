"""Rules that the code of the package keeps: private APIs, collectives, and names of methods, each in one place.

Private APIs of other libraries are used only in `alignment/internals/`, which imports the libraries on call.

ruff checks attributes with an underscore (SLF001); here are inner modules, names in texts, and private names without
an underscore. Names that are computed, loggers and texts of errors stay with the reviewer.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT

from alignment.config.registry import METHODS

LIBRARIES = ("torch", "deepspeed", "transformers", "peft", "bitsandbytes", "datasets", "accelerate", "tqdm")
LIBRARIES += ("liger_kernel",)
# The modules that their documentation imports from. Whatever else of them is imported is private.
PUBLIC = {
    *LIBRARIES,
    *("torch.distributed", "torch.nn", "torch.nn.functional", "torch.nn.utils", "torch.autograd.function"),
    *("torch.optim", "torch.optim.lr_scheduler", "torch.utils", "torch.utils.checkpoint", "torch.utils.cpp_extension"),
    *(
        "torch.utils.data",
        "torch.autograd",
        "torch.autograd.graph",
        "torch.backends",
        "torch.backends.cuda",
        "torch.cuda",
        "torch.random",
    ),
    *("torch.version", "torch.overrides", "torch.nn.attention", "torch.nn.attention.varlen", "deepspeed.utils"),
    *("deepspeed.accelerator", "deepspeed.comm", "deepspeed.ops", "deepspeed.ops.adam"),
    *("transformers.integrations", "transformers.trainer_utils", "transformers.utils", "transformers.utils.logging"),
    *("datasets.utils", "tqdm.auto", "peft.tuners.tuners_utils", "transformers.pytorch_utils", "bitsandbytes.nn"),
    "bitsandbytes.functional",
}
# Private despite their names: attributes that ZeRO-3 adds to parameters; undocumented attributes of engines,
# processors, managers, callbacks and tokenizers.
NAMES = {"ds_id", "ds_status", "ds_numel", "ds_shape", "ds_tensor", "ds_persist", "ds_active_sub_modules"}
NAMES |= {"get_param_coordinator", "parameter_offload", "FWD_MODULE_STACK", "fp16_groups", "fp32_groups"}
NAMES |= {"zero_optimization_partition_weights", "fp16_enabled", "background_thread_status", "fatal_error"}
NAMES |= {"prompt_ignore_length", "supports_continuous_batching", "tb_writer", "CUDA_HOME"}
LOOKUPS = ("getattr", "hasattr", "setattr", "delattr")
INTERNALS = ROOT / "alignment" / "internals"
FILES = sorted(path for path in (ROOT / "alignment").rglob("*.py") if INTERNALS not in path.parents)


@cache
def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
    except ValueError:  # a module in sys.modules without a spec, such as torch.backends.cudnn
        return True


def is_private(name: str) -> bool:
    """Whether the full name of an import is private: a module that is not listed, or anything with an underscore."""
    library, *rest = name.split(".")
    if library not in LIBRARIES or name in PUBLIC:
        return False
    return any(part.startswith("_") for part in rest) or is_module(name)


def touches(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every use of a private API."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if is_private(alias.name)]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            whole = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            names = [name for name in whole if is_private(name)]
        elif isinstance(node, ast.Attribute) and node.attr in NAMES:
            names = [node.attr]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in LOOKUPS:
            texts = [text.value for text in node.args[1:2] if isinstance(text, ast.Constant)]
            names = [str(text) for text in texts if text in NAMES or re.match("_(?!_)", str(text))]
        yield from ((getattr(node, "lineno", 0), name) for name in names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_private_api_is_used(path: Path) -> None:
    found = [f"line {line}: {name}" for line, name in touches(ast.parse(path.read_text(encoding="utf-8")))]
    assert not found, "move each to a function of alignment/internals/ that says why it is needed"


def test_uses_of_private_apis() -> None:
    for code, found in (
        ("import deepspeed.runtime.engine", ["deepspeed.runtime.engine"]),
        ("from transformers.integrations import deepspeed", ["transformers.integrations.deepspeed"]),
        ("hasattr(engine.optimizer, '_global_grad_norm'), parameter.ds_id", ["_global_grad_norm", "ds_id"]),
        ("from torch import nn, Tensor\nimport torch.nn.functional as F\ngetattr(options, name)", []),
    ):
        assert [name for _, name in touches(ast.parse(code))] == found


def test_internals_import_no_library() -> None:
    modules = sorted(f"alignment.internals.{path.stem}" for path in INTERNALS.glob("*.py"))
    assert len(modules) > 4
    code = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
        f"assert not set({LIBRARIES}) & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_every_function_of_internals_is_used_in_a_contract_test() -> None:
    """Or in a driver of one. Two are called by other parts: in `test_references.py` and `test_retried_runs.py`."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name != Path(__file__).name]
    texts = [text for text in (path.read_text(encoding="utf-8") for path in files) if "alignment.internals" in text]
    used = set(re.findall(r"\w+", "".join(texts)))
    functions = {
        node.name
        for path in INTERNALS.glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    assert len(functions) > 50 and functions - used == {"forget_leaf", "stop_workers"}


# Collectives ---------------------------------------------------------------------------------------------------------

# `barrier` has no tensor. ProcessFacts offers TRL's `main_process_first`, two layers below the collectives.
ELSEWHERE = {("alignment/config/process_facts.py", "barrier")}
COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter", "scatter"),
    *("reduce_scatter_tensor", "scatter_object_list", "send", "recv", "isend", "irecv", "barrier"),
    *("monitored_barrier", "all_reduce_coalesced", "all_gather_coalesced", "batch_isend_irecv"),
}


def calls(tree: ast.AST) -> set[str]:
    """Return the collectives of torch and DeepSpeed that a module mentions."""
    modules = ("torch.distributed", "distributed", "dist", "deepspeed.comm", "comm")
    found = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES and ast.unparse(node.value) in modules
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            ("torch.distributed", "deepspeed.comm")
        ):
            found |= {alias.name for alias in node.names} & COLLECTIVES
    return found


def test_collectives_are_called_in_one_module() -> None:
    found = set()
    for file in sorted((ROOT / "alignment").rglob("*.py")):
        name = str(file.relative_to(ROOT))
        found |= {(name, call) for call in calls(ast.parse(file.read_text(encoding="utf-8")))}
    home = {pair for pair in found if pair[0] == "alignment/engines/collectives.py"}
    assert {"all_reduce", "broadcast", "all_gather_object", "broadcast_object_list"} <= {call for _, call in home}
    assert found - home == ELSEWHERE


# Names of methods ----------------------------------------------------------------------------------------------------

# objectives/ names losses, one of which has the name of its method. "reward" is also the prefix of the options of
# reward models.
PACKAGES = sorted({path.parent for path in FILES} - {ROOT / "alignment"} | {INTERNALS})
BELOW = [path for path in PACKAGES if not {"methods", "objectives"} & {*path.relative_to(ROOT).parts}]


@pytest.mark.parametrize("package", BELOW, ids=lambda path: str(path.relative_to(ROOT)))
def test_lower_packages_do_not_name_a_method(package: Path) -> None:
    """import-linter checks that they do not import one."""
    for path in package.glob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        named = {node.value for node in nodes if isinstance(node, ast.Constant)} & {*METHODS.entries}
        assert named <= ({"reward"} if path.name == "reward_model.py" else set()), path
