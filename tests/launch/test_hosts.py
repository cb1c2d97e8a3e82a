"""Two hosts, as network namespaces with a link: all ways to start a run, a cut link, and misconfigured hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import DRIVERS, ROOT

from tools.chaos.judge import compare, look
from tools.chaos.world import World
from tools.hosts import network, ssh
from tools.hosts.commands import HOSTFILE, commands
from tools.hosts.network import NAMES, Host, two_hosts
from tools.ranks import RankServer
from tools.ranks.client import environment
from tools.signals.worker import Plan, Trail

pytestmark = [pytest.mark.faults, pytest.mark.skipif(network.missing() is not None, reason=str(network.missing()))]
TRAIN, WORKER = ROOT / "launch" / "train.py", ROOT / "tools" / "signals" / "worker.py"
PEER_TIMEOUT_S, MARGIN_S = 10, 6
BACK = "back0"  # an interface of each host without a peer
START_S, LAUNCHER_S = 240, 60  # on a busy machine


@dataclass(frozen=True)
class Pair:
    """Two hosts, and the expected result from a run on one machine."""

    folder: Path
    hosts: tuple[Host, Host]
    world: World
    reference: Path

    def arguments(self, output_dir: Path) -> list[str]:
        """Return the arguments of ``launch/train.py``."""
        return [*self.world.arguments("kto", output_dir), "--peer_timeout", str(PEER_TIMEOUT_S)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, ranks: RankServer) -> Iterator[Pair]:
    """The hosts, with sshd if it is installed, and the run on one machine."""
    folder = tmp_path_factory.mktemp("pair")
    world, files = World.made(folder / "world"), folder / "files"
    files.mkdir()
    (folder / "hostfile").write_text(HOSTFILE)
    # `deepspeed` does not pass on other variables.
    (folder / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\n")
    if ssh.missing() is None:
        ssh.prepare(files)
    with two_hosts(files) as hosts:
        for number, host in enumerate(hosts):
            host.run("ip", "link", "add", BACK, "type", "veth", "peer", "name", "unused")
            host.run("ip", "address", "add", f"10.78.{number}.1/24", "dev", BACK)
            for name in (BACK, "unused"):
                host.run("ip", "link", "set", name, "up")
        made = Pair(folder, hosts, world, folder / "reference")
        ranks.run(TRAIN, *made.arguments(made.reference))
        yield made


@dataclass
class Run:
    """A run on both hosts, until :meth:`end`."""

    pair: Pair
    launcher: str
    output_dir: Path
    plan: Plan | None = None

    def __post_init__(self) -> None:
        arguments, folder = self.pair.arguments(self.output_dir), self.pair.folder
        lines = commands(self.launcher, WORKER if self.plan else TRAIN, arguments, 29500, folder / "hostfile")
        env = environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **(self.plan.variable() if self.plan else {}))
        self.logs = [folder / f"{self.output_dir.name}-{self.launcher}-{number}.log" for number in range(len(lines))]
        self.processes = []
        for host, line, log in zip(self.pair.hosts, lines, self.logs):
            with log.open("w") as file:
                self.processes.append(host.start(line, file, env, folder))

    def text(self) -> str:
        """Return the output."""
        return "\n".join(log.read_text(errors="replace") for log in self.logs)

    def end(self, seconds: float) -> list[int]:
        """Return the exit statuses of all started commands."""
        until = time.monotonic() + seconds
        return [process.wait(max(0.0, until - time.monotonic())) for process in self.processes]


def test_a_link_is_cut_under_torchrun_and_the_run_resumes_with_deepspeed(pair: Pair, tmp_path: Path) -> None:
    """Both sides exit soon and name each other, and the results equal those of one host."""
    output_dir = tmp_path / "out"
    plan = Plan(str(tmp_path / "trails"), str(output_dir), slow_from=5, slow=(1.0, 1.0))
    Path(plan.folder).mkdir()
    run = Run(pair, "torchrun", output_dir, plan)
    trails = [Trail(Path(plan.folder), rank) for rank in range(2)]
    wait_for(lambda: all((trail.get("step") or 0) > 5 for trail in trails), START_S, run)
    pair.hosts[1].cut()
    cut = time.monotonic()
    try:
        wait_for(lambda: all(trail.get("code") is not None for trail in trails), PEER_TIMEOUT_S + MARGIN_S, run)
        assert [trail.get("code") for trail in trails] == [1, 1]
        assert run.end(LAUNCHER_S) == [1, 1]
        assert [host.processes() for host in pair.hosts] == [[], []], time.monotonic() - cut
    finally:
        pair.hosts[1].restore()
    lines = [line for line in run.text().splitlines() if line.startswith("error: ")]
    no_answer = f"has not responded for {PEER_TIMEOUT_S} s"
    assert len(lines) == 2, "one on each side"
    assert f"rank 1 (host {NAMES[1]}) has sent no heartbeat for {PEER_TIMEOUT_S} s, last seen in phase " in lines[0]
    assert f"rank 1 (host {NAMES[1]}): the launcher, which coordinates the ranks, {no_answer}" in lines[1]
    before = look(output_dir)
    assert before.steps and not before.problems
    again = Run(pair, "no_ssh", output_dir)
    assert again.end(START_S) == [0, 0], again.text()[-4000:]
    assert compare(output_dir, pair.reference, before.steps[-1:]) == []


@pytest.mark.skipif(ssh.missing() is not None, reason=str(ssh.missing()))
def test_deepspeed_with_pdsh_gives_the_weights_of_one_host(pair: Pair, tmp_path: Path) -> None:
    with ssh.serving(pair.hosts, pair.folder / "files"):
        run = Run(pair, "pdsh", tmp_path / "out")
        assert run.end(START_S) == [0], run.text()[-4000:]
    assert compare(tmp_path / "out", pair.reference, []) == []


NAMED = "the host name host-b resolves to 127.0.1.1, a loopback address that other hosts cannot reach"


@pytest.mark.parametrize(
    ("own_line", "variables", "rank", "message"),
    [
        ("127.0.1.1 host-b", {}, 1, NAMED),  # as written by Debian's installer
        ("127.0.1.1 host-b", {"GLOO_SOCKET_IFNAME": "eth0"}, None, ""),
        ("", {"MEET_AT": "host-c"}, None, "MASTER_ADDR=host-c cannot be resolved on host host-"),
        ("", {"GLOO_SOCKET_IFNAME": BACK}, None, "cannot reach host host-"),
    ],
    ids=["loopback", "loopback-with-interface", "unknown-name", "other-network"],
)
def test_misconfigured_hosts(
    pair: Pair, ranks: RankServer, own_line: str, variables: dict[str, str], rank: int | None, message: str
) -> None:
    file = pair.folder / "files" / "hosts"
    before = file.read_text()
    lines = [line for line in before.splitlines() if not own_line or NAMES[1] not in line]
    file.write_text("\n".join([own_line, *lines]) + "\n")
    try:
        pids = [host.pid for host in pair.hosts]
        done = ranks.run(DRIVERS / "on_hosts.py", file, *pids, env=variables, check=False, timeout=60)
    finally:
        file.write_text(before)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [each.code for each in done.ranks] == ([1, 1] if message else [0, 0]), done.report()
    if not message:
        assert "rank 0 on host-a: sum 3" in done.stdout and "rank 1 on host-b: sum 3" in done.stdout
        return
    who = "error: rank " if rank is None else f"error: rank {rank}: "
    assert all(line.startswith(who) and message in line for line in errors), errors
    # The other host cannot be notified of an unresolvable name, because it would be contacted at that address.
    assert len(errors) == (2 if "MASTER_ADDR" in message else 1)


def wait_for(reached: object, seconds: float, run: Run) -> None:
    """Wait until a condition is met."""
    end = time.monotonic() + seconds
    assert callable(reached)
    while not reached():
        assert time.monotonic() < end, run.text()[-4000:]
        time.sleep(0.1)
