"""Free memory of the host within control groups."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from alignment.engines.memory.devices import free_host_bytes, total_host_bytes

GIB = 2**30


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 16 GiB, of which 10 are free."""

    class Memory:
        available, total = 10 * GIB, 16 * GIB

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory)


def write(root: Path, files: dict[str, str | int]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def v2(folder: str, limit: str | int, usage: int, freeable: int = 0) -> dict[str, str | int]:
    top = f"sys/fs/cgroup/{folder}"
    return {
        f"{top}memory.max": limit,
        f"{top}memory.current": usage,
        f"{top}memory.stat": f"anon 5\ninactive_file {freeable}",
    }


@pytest.mark.parametrize(
    "own, files, expected",
    [
        ("0::/", {}, 10),
        ("0::/", v2("", "max", 9 * GIB), 10),
        ("0::/", v2("", 8 * GIB, 5 * GIB), 3),
        ("0::/", v2("", 8 * GIB, 5 * GIB, 2 * GIB), 5),
        ("0::/", v2("", 64 * GIB, 5 * GIB), 10),
        ("0::/", v2("", 2 * GIB, 3 * GIB), 0),
        # A job in a container, and a container with a path that it cannot see.
        ("0::/job/task", v2("job/task/", "max", 0) | v2("job/", 6 * GIB, 2 * GIB) | v2("", 9 * GIB, 2 * GIB), 4),
        ("0::/docker/abc", v2("", 8 * GIB, GIB), 7),
    ],
)
def test_control_groups(tmp_path: Path, own: str, files: dict[str, str | int], expected: int) -> None:
    assert free_host_bytes(write(tmp_path, {"proc/self/cgroup": own, **files})) == expected * GIB


def test_the_first_version(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/memory"
    files: dict[str, str | int] = {
        "proc/self/cgroup": "9:cpu:/x\n4:memory:/job\n0::/",
        f"{top}/memory.limit_in_bytes": 2**63 - 4096,
        f"{top}/memory.usage_in_bytes": 7 * GIB,
        f"{top}/job/memory.limit_in_bytes": 6 * GIB,
        f"{top}/job/memory.usage_in_bytes": 4 * GIB,
        f"{top}/job/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}",
    }
    assert free_host_bytes(write(tmp_path, files)) == 3 * GIB
    assert total_host_bytes(tmp_path) == 6 * GIB, "the lowest limit of all groups, whatever the usage"


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path) == 10 * GIB
