"""No package below ``methods/`` knows a method: neither its classes nor, to decide anything by, its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from alignment.config.registry import METHODS

PACKAGE = ROOT / "alignment"
# objectives/ and options name losses, one of which is called as its method is.
_EXEMPT = ("methods", "objectives", "demo")
LOWER = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if path.parent != PACKAGE and path.relative_to(PACKAGE).parts[0] not in _EXEMPT
)


def faults(source: str) -> Iterator[str]:
    """Imports from ``alignment.methods``, and comparisons with and lookups by a method's name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("alignment.methods"):
            yield f"line {node.lineno}: imports {node.module}"
        elif isinstance(node, ast.Import) and any(name.name.startswith("alignment.methods") for name in node.names):
            yield f"line {node.lineno}: imports a method"
        elif isinstance(node, ast.Compare) and "loss_type" not in ast.unparse(node):
            yield from _named(node, [node.left, *node.comparators], "compares with")
        elif isinstance(node, ast.Subscript):
            yield from _named(node, [node.slice], "looks up")
        elif isinstance(node, ast.Dict):
            yield from _named(node, [key for key in node.keys if key is not None], "has a key")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
            yield from _named(node, node.args[:1], "looks up")
        elif isinstance(node, ast.match_case):
            yield from _named(
                node.body[0], [p.value for p in ast.walk(node.pattern) if isinstance(p, ast.MatchValue)], "matches"
            )


def _named(node: ast.AST, values: list[ast.expr], what: str) -> Iterator[str]:
    for value in values:
        for part in ast.walk(value):
            if isinstance(part, ast.Constant) and part.value in METHODS.entries:
                yield f"line {getattr(node, 'lineno', 0)}: {what} {part.value!r}"


@pytest.mark.parametrize("path", LOWER, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_lower_package_knows_no_method(path: Path) -> None:
    assert list(faults(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "from alignment.methods.kto import KTOTrainer",
        "import alignment.methods.cpo_options as options",
        "if options.method == 'cpo': pass",
        "if options.method in ('kto', 'cpo'): pass",
        "x = {'kto': 1}",
        "x = TABLE['online_dpo']",
        "x = TABLE.get('sft', 3)",
        "match method:\n    case 'reward': pass",
    ],
)
def test_the_walk_sees_it(source: str) -> None:
    assert list(faults(source))


@pytest.mark.parametrize("source", ["x = options.loss_type == 'kto'", "x = 'kto'", "f('kto')", "x = {'KTO': 1}"])
def test_the_walk_lets_it_pass(source: str) -> None:
    assert list(faults(source)) == []
