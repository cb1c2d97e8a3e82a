"""Requirements for writing a checkpoint together: one shared folder, and a barrier at which the host waits."""

from __future__ import annotations

import json

import pytest
from conftest import DRIVERS

from tools.ranks import RankServer

pytestmark = pytest.mark.ci

SHARED = ("shared", "to be made", "late")


@pytest.fixture(scope="module")
def found(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """The results of two ranks."""
    folder = tmp_path_factory.mktemp("folders")
    done = ranks.run(DRIVERS / "shared_folder.py", folder, timeout=60)
    own = [{"folder": str(folder)}, {"folder": str(folder)}]
    return [json.loads(rank.stdout.splitlines()[-1]) | more for rank, more in zip(done.ranks, own)]


def test_a_barrier_blocks_the_host_where_an_all_reduce_does_not(found: list[dict[str, object]]) -> None:
    first, second = (entry["waited"] for entry in found)
    assert isinstance(first, list) and isinstance(second, list)
    assert first[0] > 0.3 and second[1] > 0.3, "who came first waited for the other"


def test_a_folder_visible_to_all_ranks(found: list[dict[str, object]]) -> None:
    for entry in found:
        assert {name: entry[name] for name in SHARED} == dict.fromkeys(SHARED, "shared")
        assert entry["left"] == ["0", "1", "late"], "nothing is left behind"


def test_a_folder_invisible_to_one_rank_is_rejected_on_all(found: list[dict[str, object]]) -> None:
    for number, entry in enumerate(found):
        folder = entry["folder"]
        assert entry["node-local"] == (
            f"output_dir: {folder}/{number}/out is node-local: n2 does not see the files of n1; choose a folder "
            "on a file system that all nodes share"
        )


@pytest.mark.parametrize(
    ("case", "host", "reason"),
    [
        ("read-only on rank 0", "n1", "Read-only file system"),
        ("read-only on rank 1", "n2", "Read-only file system"),
        ("no quota on rank 1", "n2", "Disk quota exceeded"),
    ],
)
def test_a_folder_that_one_rank_cannot_write_is_rejected_on_all(
    case: str, host: str, reason: str, found: list[dict[str, object]]
) -> None:
    for entry in found:
        expected = f"output_dir: {entry['folder']}/0 cannot be written on {host}: {reason}; choose another output_dir"
        assert entry[case] == expected
