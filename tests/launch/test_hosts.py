"""Two hosts, as network namespaces with a link: all ways to start a run, a cut link, and misconfigured hosts."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

import pytest
from conftest import DRIVERS, ROOT
from support.helpers import make_model

from tools.chaos.judge import compare, look
from tools.chaos.world import World
from tools.hosts import network
from tools.hosts.network import NAMES, Host, two_hosts
from tools.ranks import RankServer
from tools.ranks.client import environment
from tools.ranks.process import wait_until
from tools.signals.worker import Plan, Trail

pytestmark = [pytest.mark.slow, pytest.mark.skipif(network.missing() is not None, reason=str(network.missing()))]
TRAIN, WORKER = ROOT / "launch" / "train.py", ROOT / "tools" / "signals" / "worker.py"
PEER_TIMEOUT_S, MARGIN_S = 10, 6
START_S, LAUNCHER_S = 240, 60  # on a busy machine
WHERE = ("--master_addr", NAMES[0], "--master_port", "29500")
LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", *WHERE),
    "no_ssh": ("deepspeed.launcher.runner", "--hostfile", "hostfile", "--no_ssh", *WHERE),
    "pdsh": ("deepspeed.launcher.runner", "--hostfile", "hostfile", *WHERE),
}


@dataclass
class Pair:
    """Two hosts, and the expected result from a run on one machine."""

    folder: Path
    hosts: tuple[Host, Host]
    world: World
    reference: Path
    logs: list[Path] = field(default_factory=list)

    def arguments(self, output_dir: Path) -> list[str]:
        """Return the arguments of ``launch/train.py``."""
        return [*self.world.arguments("kto", output_dir), "--peer_timeout", str(PEER_TIMEOUT_S)]

    def start(self, launcher: str, output_dir: Path, plan: Plan | None = None) -> list[Popen[str]]:
        """Start a run with a command on each host, or on the first one with pdsh."""
        env = environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **(plan.variable() if plan else {}))
        script = [str(WORKER if plan else TRAIN), *self.arguments(output_dir)]
        processes = []
        self.logs = [self.folder / f"{output_dir.name}-{launcher}-{number}.log" for number in range(2)]
        for number, (host, log) in enumerate(zip(self.hosts, self.logs)):
            own = () if launcher == "pdsh" else ("--node_rank", str(number))
            with log.open("w") as file:
                if launcher != "pdsh" or number == 0:
                    line = [sys.executable, "-m", *LAUNCHERS[launcher], *own, *script]
                    processes.append(host.start(line, file, env, self.folder))
        return processes

    def end(self, processes: list[Popen[str]], seconds: float) -> list[int]:
        """Return the exit statuses of a run."""
        until = time.monotonic() + seconds
        return [process.wait(max(0.0, until - time.monotonic())) for process in processes]

    def text(self) -> str:
        """Return the output of the last run."""
        return "\n".join(log.read_text(errors="replace") for log in self.logs)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, ranks: RankServer) -> Iterator[Pair]:
    """The hosts, with sshd if it is installed, and the run on one machine."""
    folder = tmp_path_factory.mktemp("pair")
    world, files = World.made(folder / "world"), folder / "files"
    files.mkdir()
    (folder / "hostfile").write_text("".join(f"{name} slots=1\n" for name in NAMES))
    # `deepspeed` does not pass on other variables.
    (folder / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\n")
    if network.ssh_missing() is None:
        network.prepare_ssh(files)
    with two_hosts(files) as hosts:
        made = Pair(folder, hosts, world, folder / "reference")
        ranks.run(TRAIN, *made.arguments(made.reference))
        yield made


def test_a_link_is_cut_under_torchrun_and_the_run_resumes_with_deepspeed(pair: Pair, tmp_path: Path) -> None:
    """Both sides exit soon, and the results equal those of one host."""
    output_dir = tmp_path / "out"
    plan = Plan(str(tmp_path / "trails"), str(output_dir), slow_from=5, slow=(1.0, 1.0))
    Path(plan.folder).mkdir()
    run = pair.start("torchrun", output_dir, plan)
    trails = [Trail(Path(plan.folder), rank) for rank in range(2)]
    wait_until(lambda: all((trail.get("step") or 0) > 5 for trail in trails), START_S, pair.text)
    pair.hosts[1].link("down")
    try:
        wait_until(
            lambda: all(trail.get("code") is not None for trail in trails), PEER_TIMEOUT_S + MARGIN_S, pair.text
        )
        assert [trail.get("code") for trail in trails] == [1, 1]
        assert pair.end(run, LAUNCHER_S) == [1, 1]
        assert [host.processes() for host in pair.hosts] == [[], []]
    finally:
        pair.hosts[1].link("up")
    for log in pair.logs:
        (line,) = (line for line in log.read_text().splitlines() if line.startswith("error: "))
        assert "rank 1" in line and NAMES[1] in line and f"{PEER_TIMEOUT_S} s" in line
    before = look(output_dir)
    assert before.steps and not before.problems
    assert pair.end(pair.start("no_ssh", output_dir), START_S) == [0, 0], pair.text()[-4000:]
    assert [said for said in compare(output_dir, pair.reference, before.steps[-1:]) if "hang-" not in said] == []
    assert {path.name for path in output_dir.glob("hang-*.txt")} == {"hang-0.txt", "hang-1.txt"}


@pytest.mark.skipif(network.ssh_missing() is not None, reason=str(network.ssh_missing()))
def test_deepspeed_with_pdsh_gives_the_weights_of_one_host(pair: Pair, tmp_path: Path) -> None:
    with network.serving_ssh(pair.hosts, pair.folder / "files"):
        assert pair.end(pair.start("pdsh", tmp_path / "out"), START_S) == [0], pair.text()[-4000:]
    assert compare(tmp_path / "out", pair.reference, []) == []


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth0"}, ""),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "could not connect to the other ranks"),
        ({"MEET_AT": "host-c"}, "cannot reach rank 0 at MASTER_ADDR=host-c"),
    ],
    ids=["right-interface", "wrong-interface", "unknown-name"],
)
def test_misconfigured_hosts(pair: Pair, ranks: RankServer, variables: dict[str, str], message: str) -> None:
    arguments = [pair.folder / "files" / "hosts", *(host.pid for host in pair.hosts)]
    done = ranks.run(DRIVERS / "on_hosts.py", *arguments, env=variables, check=False, timeout=60)
    assert [each.code for each in done.ranks] == ([1, 1] if message else [0, 0]), done.report()
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: rank ")]
    assert all(message in line for line in errors) and bool(errors) == bool(message), done.stderr
    if not message:
        assert all(f"rank {rank} on {NAMES[rank]}, 1 here: sum 3" in done.stdout for rank in range(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "codes"),
    [
        ("stop", [1, None]),
        ("lock", [1, 1]),
        ("kill", [1, -9]),
        ("link", [1, 1]),
    ],
)
def test_a_plain_script_on_two_hosts(fault: str, codes: list[int | None], pair: Pair, tmp_path: Path) -> None:
    """Without a launcher, the ranks of a script that calls ``train()`` still notice each other's end."""
    model = make_model(tmp_path / "model", layers=1)
    script = [
        sys.executable,
        str(DRIVERS / "plain_script.py"),
        "sleep" if fault == "link" else fault,
        str(tmp_path),
        model,
    ]
    pair.logs, run = [tmp_path / f"{name}.log" for name in NAMES], []
    for rank, (host, log) in enumerate(zip(pair.hosts, pair.logs)):
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        own |= {"MASTER_ADDR": NAMES[0], "MASTER_PORT": "29501", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        with log.open("w") as file:
            run.append(host.start(script, file, environment(OMP_NUM_THREADS="1", **own), tmp_path))
    wait_until((tmp_path / "reached").exists, START_S, pair.text)
    began = time.monotonic()
    try:
        if fault == "link":
            pair.hosts[1].link("down")
        for process, code in zip(run, codes):
            if code is not None:
                assert process.wait(START_S) == code, pair.text()[-4000:]
        assert time.monotonic() - began < 5 + 30  # peer_timeout of the script
        assert re.search(rf"rank 1 \(host {NAMES[1]}\b.* in phase \w+, step 2\b", pair.logs[0].read_text()), (
            pair.text()
        )
    finally:
        pair.hosts[1].link("up")
        for process in run:
            process.kill()
