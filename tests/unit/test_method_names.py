"""No package below ``methods/`` depends on a method: not even on its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from alignment.config.registry import METHODS

PACKAGE = ROOT / "alignment"
# objectives/ names losses, one of which has the name of its method
_EXEMPT = ("methods", "objectives")
# The same text as a method's name by coincidence: the prefix of the reward model's options.
_CHANCE = {("rewards/reward_model.py", "reward")}
LOWER = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if path.parent != PACKAGE and path.relative_to(PACKAGE).parts[0] not in _EXEMPT
)


def faults(source: str) -> Iterator[tuple[str, str]]:
    """Return the lines of strings that are a method's name; import-linter checks imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in METHODS.entries:
            yield f"line {node.lineno}", str(node.value)


@pytest.mark.parametrize("path", LOWER, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_lower_packages_do_not_depend_on_methods(path: Path) -> None:
    name = str(path.relative_to(PACKAGE))
    found = [fault for fault in faults(path.read_text(encoding="utf-8")) if (name, fault[1]) not in _CHANCE]
    assert found == []
