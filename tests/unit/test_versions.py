"""`constraints.txt` pins versions allowed by setup.py, and `tools/versions.py` reports differences."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.versions import CONSTRAINTS, differences, pinned


def required() -> list[Requirement]:
    """Return the requirements in setup.py for users, tests and mutants."""
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper()
        if node.targets[0].id in ("REQUIRED", "EXTRAS")
    }
    return list(
        map(
            Requirement,
            [*values["REQUIRED"], *values["EXTRAS"]["test"], *values["EXTRAS"]["docs"], *values["EXTRAS"]["mutants"]],
        )
    )


@pytest.mark.parametrize("requirement", required(), ids=str)
def test_a_requirement_is_pinned_within_its_range(requirement: Requirement) -> None:
    name = canonicalize_name(requirement.name)
    (pin,) = [one for one in pinned() if canonicalize_name(one.name) == name]
    (exact,) = pin.specifier
    assert exact.operator == "==" and requirement.specifier.contains(exact.version)


def test_a_name_is_pinned_once() -> None:
    names = [canonicalize_name(one.name) for one in pinned()]
    assert len(names) == len(set(names))


def test_local_builds_match_the_version(tmp_path: Path) -> None:
    """`2.13.0+cpu` is `2.13.0`."""
    assert Requirement("torch==2.13.0").specifier.contains("2.13.0+cpu")
    own = importlib.metadata.version("tqdm")
    file = tmp_path / "constraints.txt"
    file.write_text(
        f"# a comment\n\ntqdm=={own}\npytest==1.0  # long ago\nno-such-package==1\nruff==1; python_version < '3'\n"
    )
    assert list(differences(file)) == [("pytest", "1.0", importlib.metadata.version("pytest"))]


def test_make_reads_the_torch_range_from_setup_py() -> None:
    """It uses the range; the version is pinned by the constraints of every `pip install` in `make install`."""
    said = subprocess.run(
        ["make", "-n", "-B", "install", "VENV=elsewhere"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    torch = next(line for line in (ROOT / "setup.py").read_text().splitlines() if '"torch' in line).strip(" ,")
    installs = [line for line in said.splitlines() if "pip install" in line]
    assert torch in said and len(installs) >= 3
    assert all(line.count("pip install") == line.count(f"-c {CONSTRAINTS.name}") for line in installs)
