"""Makes the two hosts, runs commands on them, cuts their link and switches them off; nothing of them stays.

A host is a process in namespaces of its own, first of its process namespace: when it ends, the kernel ends everything
that runs there and removes the network. Both ends of the link are called eth0. Files are those of the machine, as on a
shared disk, but for /etc/hosts, where the hosts find each other, and /run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from tools.ranks.process import die_with_parent

PROGRAMS = ("ip", "unshare", "nsenter", "mount", "ps")
NAMES = ("host-a", "host-b")
LINK = "eth0"
_NEW_MOUNTS, _BIND, _RECURSIVE, _PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000  # of unshare(2) and mount(2)
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
# Arguments: name, folder with the files that take the place of the machine's.
_FIRST_PROCESS = """
set -e
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
if [ -e "$2/ssh_config" ]; then mount --bind "$2/ssh_config" /etc/ssh/ssh_config; fi
mount -t tmpfs tmpfs /run
mkdir /run/sshd
ip link set lo up
echo ready
sleep infinity &
wait  # and so reap what has lost its parent
"""


def missing() -> str | None:
    """What this machine lacks for two hosts; None if nothing."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed (make hosts installs them)"
    status = Path("/proc/self/status").read_text(encoding="ascii")
    effective = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff")), 16)
    if os.geteuid() != 0 or not all(effective >> bit & 1 for bit in (_CAP_NET_ADMIN, _CAP_SYS_ADMIN)):
        return "network namespaces need root with CAP_NET_ADMIN and CAP_SYS_ADMIN"
    tried = subprocess.run(["unshare", "-n", "-m", "-u", "-p", "-f", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.decode().strip()}"


@dataclass(frozen=True)
class Host:
    """One of the hosts.

    Attributes:
        name, address: by which the other one knows it.
        pid: of its first process, outside of it.
    """

    name: str
    address: str
    pid: int

    def command(self, arguments: Sequence[str], folder: Path | None = None) -> list[str]:
        """The command line that runs a command on this host, by default in the present folder."""
        spaces = ["--net", "--mount", "--uts", "--ipc", "--pid", f"--wd={folder or os.getcwd()}"]
        return ["nsenter", f"--target={self.pid}", *spaces, "--", *arguments]

    def run(self, *arguments: str) -> str:
        """Run a short command to its end and return what it prints.

        Raises:
            CalledProcessError: it failed.
        """
        done = subprocess.run(self.command(arguments), capture_output=True, text=True, check=True, timeout=30)
        return done.stdout

    def start(
        self, arguments: Sequence[str], log: IO[str], env: Mapping[str, str], folder: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a command, by default in the present folder; what it prints goes to a file."""
        return subprocess.Popen(
            self.command(arguments, folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(env),
            text=True,
        )

    def enter(self, hosts: Path) -> None:
        """Move this process to its network and name, and have it find the hosts by a file; /proc stays as it is."""
        library = ctypes.CDLL(None, use_errno=True)

        def call(name: str, *arguments: object) -> None:
            if getattr(library, name)(*arguments):
                raise OSError(ctypes.get_errno(), f"{name} on {self.name}: {os.strerror(ctypes.get_errno())}")

        for space in ("net", "uts"):
            with open(f"/proc/{self.pid}/ns/{space}", "rb") as file:
                call("setns", file.fileno(), 0)
        call("unshare", _NEW_MOUNTS)
        call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)
        call("mount", os.fsencode(hosts), b"/etc/hosts", None, _BIND, None)

    def cut(self) -> None:
        """Take the link down at this end: nothing arrives any more, and nobody is told."""
        self.run("ip", "link", "set", LINK, "down")

    def mend(self) -> None:
        """Bring the link up again."""
        self.run("ip", "link", "set", LINK, "up")

    def processes(self) -> list[str]:
        """The command lines of what runs there, but for its first process, daemons of ssh and what looks."""
        listing = self.run("ps", "-e", "-o", "pid=,args=").splitlines()
        own = (" ps -e -o", " sshd: ", " sleep infinity")
        return [line.strip() for line in listing if line.split()[0] != "1" and not any(part in line for part in own)]

    def switch_off(self) -> None:
        """End everything on it at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other, within this context.

    Args:
        folder: for their files; an ``ssh_config`` that is there takes the place of the machine's.
    """
    addresses = [f"10.77.0.{number}" for number in (1, 2)]
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in zip(addresses, NAMES))]
    (folder / "hosts").write_text("\n".join(lines) + "\n", encoding="ascii")
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(_host(name, address, folder)) for name, address in zip(NAMES, addresses)]
        first, second = made
        ends = ["name", LINK, "netns", str(first.pid)], ["name", LINK, "netns", str(second.pid)]
        subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True, timeout=30)
        for host in made:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", LINK)
            host.mend()
        yield first, second


@contextlib.contextmanager
def _host(name: str, address: str, folder: Path) -> Iterator[Host]:
    parent = os.getpid()
    spaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    process = subprocess.Popen(
        ["unshare", *spaces, "sh", "-c", _FIRST_PROCESS, "sh", name, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: die_with_parent(parent, signal.SIGKILL),
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{name} did not start: unshare ended with status {process.wait()}")
        (first,) = psutil.Process(process.pid).children()
        yield Host(name, address, first.pid)
    finally:
        process.kill()  # takes the first process of the host along, and the kernel the others
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
