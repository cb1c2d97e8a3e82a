"""Create the two hosts, run commands on them, cut their link and switch them off, without leaving anything behind.

A host is a process in separate namespaces, the first one in its PID namespace: when it exits, the kernel kills
everything that runs there and removes the network. Both ends of the link are called eth0. The hosts share the
machine's files, as on a shared disk, except for /etc/hosts, which has the addresses of both hosts, and /run.
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
# Arguments: name, folder with the files that replace the machine's.
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
wait  # reaps orphaned processes
"""


def missing() -> str | None:
    """Return what this machine lacks for two hosts, or None."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed (make hosts installs them)"
    status = Path("/proc/self/status").read_text(encoding="ascii")
    effective = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff")), 16)
    if os.geteuid() != 0 or not all(effective >> bit & 1 for bit in (_CAP_NET_ADMIN, _CAP_SYS_ADMIN)):
        return "network namespaces need root with CAP_NET_ADMIN and CAP_SYS_ADMIN"
    tried = subprocess.run(["unshare", "-n", "-m", "-u", "-p", "-f", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else f"namespaces cannot be created: {tried.stderr.decode().strip()}"


@dataclass(frozen=True)
class Host:
    """One of the hosts.

    Attributes:
        name, address: host name and IP address.
        pid: process ID of its first process, as seen from outside.
    """

    name: str
    address: str
    pid: int

    def command(self, arguments: Sequence[str], folder: Path | None = None) -> list[str]:
        """Return the command line that runs a command on this host, by default in the current folder."""
        spaces = ["--net", "--mount", "--uts", "--ipc", "--pid", f"--wd={folder or os.getcwd()}"]
        return ["nsenter", f"--target={self.pid}", *spaces, "--", *arguments]

    def run(self, *arguments: str) -> str:
        """Run a short command and return its output.

        Raises:
            CalledProcessError: the command failed.
        """
        done = subprocess.run(self.command(arguments), capture_output=True, text=True, check=True, timeout=30)
        return done.stdout

    def start(
        self, arguments: Sequence[str], log: IO[str], env: Mapping[str, str], folder: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a command, by default in the current folder, with its output redirected to a file."""
        return subprocess.Popen(
            self.command(arguments, folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(env),
            text=True,
        )

    def enter(self, hosts: Path) -> None:
        """Move this process to the host's network, host name and hosts file. /proc is unchanged."""
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
        """Take the link down at this end, silently dropping all packets."""
        self.run("ip", "link", "set", LINK, "down")

    def restore(self) -> None:
        """Bring the link back up."""
        self.run("ip", "link", "set", LINK, "up")

    def processes(self) -> list[str]:
        """Return the command lines of the host's processes, except its first one, ssh daemons and this query."""
        listing = self.run("ps", "-e", "-o", "pid=,args=").splitlines()
        own = (" ps -e -o", " sshd: ", " sleep infinity")
        return [line.strip() for line in listing if line.split()[0] != "1" and not any(part in line for part in own)]

    def switch_off(self) -> None:
        """Kill everything on the host immediately."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Provide two connected hosts within this context.

    Args:
        folder: folder for their files; if it contains an ``ssh_config``, that replaces the machine's.
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
            host.restore()
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
            raise RuntimeError(f"{name} did not start: unshare exited with status {process.wait()}")
        (first,) = psutil.Process(process.pid).children()
        yield Host(name, address, first.pid)
    finally:
        process.kill()  # kills the first process of the host, and the kernel kills the others
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
