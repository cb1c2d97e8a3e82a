"""The server that forks the ranks of tests: the environment of a rank, and that ranks never hang or stay behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import DRIVERS, ROOT

from tools.ranks import RankServer, RanksFailed
from tools.ranks.client import ADDRESS

ODD = DRIVERS / "odd_ranks.py"


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def alive(folder: Path) -> list[int]:
    """Return the running processes that have written their IDs to ``folder``."""
    return [int(file.name) for file in folder.iterdir() if is_alive(int(file.name))]


def eventually(reached: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not reached() and time.monotonic() < end:
        time.sleep(0.05)
    return reached()


def test_each_rank_is_a_separate_process(ranks: RankServer, tmp_path: Path) -> None:
    done = ranks.run(ODD, "facts", "more", cwd=tmp_path, env={"OWN": "value"})
    seen = [json.loads(rank.stdout.splitlines()[1]) for rank in done.ranks]
    ports = {one["variables"].pop("MASTER_PORT") for one in seen}
    assert len(ports) == 1 and ports.pop().isdecimal()
    for rank, one in enumerate(seen):
        assert one["variables"] == {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            **{"MASTER_ADDR": "127.0.0.1", "OWN": "value"},
        }
        assert one["arguments"] == ["facts", "more"] and one["folder"] == str(tmp_path) and one["session"]
        libraries = {"torch": True, "deepspeed": True, "datasets": True}
        assert one["imported"] == {**libraries, "alignment": False, "helpers": False}
        assert done.ranks[rank].stdout.startswith(f"rank {rank} began\n") and done.ranks[rank].stderr == ""


def test_concurrent_jobs_have_different_ports(ranks: RankServer) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tools.ranks import RankServer\n"
        "print(RankServer().run(sys.argv[2], 'facts').ranks[0].stdout.splitlines()[1])"
    )
    environ = {**os.environ, ADDRESS: ranks.address}
    command = [sys.executable, "-c", code, str(ROOT), str(ODD)]
    jobs = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    seen = [json.loads(job.communicate(timeout=60)[0])["variables"]["MASTER_PORT"] for job in jobs]
    assert len(set(seen)) == 2


def test_a_rank_imports_the_checkout_of_its_job(ranks: RankServer, tmp_path: Path) -> None:
    """One server runs several versions: mutated trees, and both sides of same_numbers."""
    script = tmp_path / "scripts" / "script.py"
    script.parent.mkdir()
    script.write_text("import alignment; print(alignment.__file__)")
    (tmp_path / "alignment").mkdir()
    (tmp_path / "alignment" / "__init__.py").write_text("")
    with_own = RankServer(tmp_path, ranks.address)
    assert ranks.run(script, nproc=1).stdout == f"{ROOT / 'alignment' / '__init__.py'}\n"
    assert with_own.run(script, nproc=1).stdout == f"{tmp_path / 'alignment' / '__init__.py'}\n"


@pytest.mark.parametrize(
    ("end", "code", "stderr"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no recipe')", 1, "no recipe\n"),
        ("import sys; sys.exit()", 0, ""),
        ("import atexit; atexit.register(print, 'at exit', flush=True)", 0, ""),
        ("raise ValueError('x')", 1, "ValueError: x\n"),
    ],
)
def test_a_script_exits_as_under_python(ranks: RankServer, tmp_path: Path, end: str, code: int, stderr: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"print('began')\n{end}\n")
    done = ranks.run(script, nproc=1, check=False)
    assert done.returncode == code and done.stderr.endswith(stderr)
    assert done.stdout == ("began\nat exit\n" if "atexit" in end else "began\n")


@pytest.mark.faults
@pytest.mark.parametrize(
    ("what", "bound", "said"),
    [
        ("killed", 2.0, "rank 1 was killed by SIGKILL after "),
        ("fails", 2.0, "rank 1 exited with status 1 after "),
        ("hangs", 4.0, "rank 1 did not end within 3 s and was killed; rank 0 exited with status 0"),
        ("stopped", 4.0, "rank 1 was stopped and did not end within 3 s and was killed; rank 0 exited with status 0"),
    ],
)
def test_a_rank_that_dies_or_hangs_is_reported_in_time(
    ranks: RankServer, tmp_path: Path, what: str, bound: float, said: str
) -> None:
    assert ranks.address, "the server has started, which takes longer than any of this"
    start = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        ranks.run(ODD, what, env={"PIDS": str(tmp_path)}, timeout=3, grace=1)
    assert time.monotonic() - start < bound + 2, "the machine may be busy"
    report = str(failed.value)
    assert report.startswith(said)
    assert report.index("--- rank 1 ---") < report.index("rank 1 began") < report.index("--- rank 0 ---")
    if what in ("killed", "fails"):
        assert "rank 0 was still running 1 s after rank 1 had failed and was killed" in report
    if what == "hangs":
        assert "in waits_for_ever" in report
    if what == "fails":
        assert "ValueError: a defect" in report
    assert len(list(tmp_path.iterdir())) == 2 and alive(tmp_path) == []


@pytest.mark.faults
def test_processes_left_by_a_rank_are_killed(ranks: RankServer, tmp_path: Path) -> None:
    ranks.run(ODD, "daemon", env={"PIDS": str(tmp_path)})
    assert len(list(tmp_path.iterdir())) == 4 and alive(tmp_path) == []


@pytest.mark.faults
@pytest.mark.parametrize("who", ["the client", "the server"])
def test_no_rank_outlives_the_client_or_the_server(tmp_path: Path, who: str) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tools.ranks import RankServer\n"
        "server = RankServer(); server.address; print(server._process.pid, flush=True)\n"
        "server.run(sys.argv[2], 'both hang', env={'PIDS': sys.argv[3]}, timeout=600)"
    )
    environ = {name: value for name, value in os.environ.items() if name != ADDRESS}
    command = [sys.executable, "-c", code, str(ROOT), str(ODD), str(tmp_path)]
    client = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert client.stdout is not None
    server = int(client.stdout.readline())
    assert eventually(lambda: len(alive(tmp_path)) == 2)
    os.kill(client.pid if who == "the client" else server, signal.SIGKILL)
    assert eventually(lambda: not alive(tmp_path))
    assert client.wait(10) != 0
    assert eventually(lambda: not is_alive(server))
