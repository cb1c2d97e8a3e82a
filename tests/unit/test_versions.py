"""`constraints.txt` pins versions allowed by setup.py."""

from __future__ import annotations

import ast
import subprocess

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CONSTRAINTS = ROOT / "constraints.txt"
LINES = [line.partition("#")[0].strip() for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines()]
PINNED = [pin for pin in map(Requirement, filter(None, LINES)) if pin.marker is None or pin.marker.evaluate()]


def required() -> list[Requirement]:
    """Return the requirements in setup.py for users, tests and mutants."""
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper()
        if node.targets[0].id in ("REQUIRED", "EXTRAS")
    }
    extras = values["EXTRAS"]
    return [Requirement(one) for one in (*values["REQUIRED"], *extras["test"], *extras["docs"], *extras["mutants"])]


@pytest.mark.parametrize("requirement", required(), ids=str)
def test_a_requirement_is_pinned_within_its_range(requirement: Requirement) -> None:
    name = canonicalize_name(requirement.name)
    (pin,) = [one for one in PINNED if canonicalize_name(one.name) == name]
    (exact,) = pin.specifier
    assert exact.operator == "==" and requirement.specifier.contains(exact.version)


def test_make_reads_the_torch_range_from_setup_py() -> None:
    """It uses the range; the version is pinned by the constraints of every `pip install` in `make install`."""
    said = subprocess.run(
        ["make", "-n", "-B", "install", "VENV=elsewhere"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    torch = next(line for line in (ROOT / "setup.py").read_text().splitlines() if '"torch' in line).strip(" ,")
    installs = [line for line in said.splitlines() if "pip install" in line]
    assert torch in said and len(installs) >= 3
    assert all(line.count("pip install") == line.count(f"-c {CONSTRAINTS.name}") for line in installs)
