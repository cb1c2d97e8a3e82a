"""Create the two hosts, run commands on them and cut their link, without leaving anything behind.

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
from typing import IO, Any

import psutil

from tools.ranks.process import die_with_parent, wait_until

NAMES = ("host-a", "host-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
LINK = "eth0"
_UNSHARE = ("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
_NEW_MOUNTS, _BIND, _RECURSIVE, _PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000  # of unshare(2) and mount(2)
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

_SSHD = "/usr/sbin/sshd"  # it re-executes itself for each connection, which requires its full path
_CLIENT = """Host *
IdentityFile {folder}/user_key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""
_SERVER = """HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
"""


def missing() -> str | None:
    """Return what this machine lacks for two hosts, or None."""
    lacking = [name for name in ("ip", "unshare", "nsenter", "mount", "ps") if shutil.which(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed (make hosts installs them)"
    link = ("ip", "link", "add", "name", LINK, "type", "veth", "peer", "name", "other")
    tried = subprocess.run([*_UNSHARE, *link], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"networks cannot be created: {tried.stderr.strip()}"


@dataclass(frozen=True)
class Host:
    """One of the hosts: its name, and the process ID of its first process, as seen from outside."""

    name: str
    pid: int

    def start(
        self, arguments: Sequence[str], log: IO[str] | int, env: Mapping[str, str] | None = None, folder: Any = None
    ) -> subprocess.Popen[str]:
        """Start a command, by default in the current folder, with its output redirected."""
        spaces = ("--net", "--mount", "--uts", "--ipc", "--pid", f"--wd={folder or os.getcwd()}")
        command = ["nsenter", f"--target={self.pid}", *spaces, "--", *arguments]
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, env=env, text=True, **streams)

    def run(self, *arguments: str) -> str:
        """Run a short command and return its output; a RuntimeError if it fails."""
        process = self.start(arguments, subprocess.PIPE)
        out = process.communicate(timeout=30)[0]
        if process.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(arguments)}: {out}")
        return out

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

    def link(self, state: str) -> None:
        """Take the link at this end ``up`` or ``down``, which silently drops all packets."""
        self.run("ip", "link", "set", LINK, state)

    def processes(self) -> list[str]:
        """Return the command lines of the host's processes, except its first one, ssh daemons and this query."""
        own = (" ps -e -o", " sshd: ", " sleep infinity")
        listing = self.run("ps", "-e", "-o", "pid=,args=").splitlines()
        return [line.strip() for line in listing if line.split()[0] != "1" and not any(part in line for part in own)]


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Provide two connected hosts within this context; an ``ssh_config`` in ``folder`` replaces the machine's."""
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in zip(ADDRESSES, NAMES))]
    (folder / "hosts").write_text("\n".join(lines) + "\n", encoding="ascii")
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(_host(name, folder)) for name in NAMES)
        peer = ("type", "veth", "peer", "name", LINK, "netns", str(second.pid))
        subprocess.run(["ip", "link", "add", "name", LINK, "netns", str(first.pid), *peer], check=True, timeout=30)
        for host, address in zip((first, second), ADDRESSES):
            host.run("ip", "address", "add", f"{address}/24", "dev", LINK)
            host.link("up")
        yield first, second


@contextlib.contextmanager
def _host(name: str, folder: Path) -> Iterator[Host]:
    parent = os.getpid()
    process = subprocess.Popen(
        [*_UNSHARE, "sh", "-c", _FIRST_PROCESS, "sh", name, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: die_with_parent(parent, signal.SIGKILL),
    )
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{name} did not start: unshare exited with status {process.wait()}")
        (first,) = psutil.Process(process.pid).children()
        yield Host(name, first.pid)
    finally:
        process.kill()  # kills the first process of the host, and the kernel kills the others
        process.wait()
        process.stdout.close()


def ssh_missing() -> str | None:
    """Return what this machine lacks for a private sshd on each host, or None."""
    lacking = [name for name in ("pdsh", "ssh", "ssh-keygen", _SSHD) if shutil.which(name) is None]
    return f"{', '.join(lacking)} not installed (make hosts installs them)" if lacking else None


def prepare_ssh(folder: Path) -> None:
    """Write keys and settings, which replace the machine's, before the hosts are created."""
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    for name, text in (("ssh_config", _CLIENT), ("sshd_config", _SERVER)):
        (folder / name).write_text(text.format(folder=folder), encoding="utf-8")


@contextlib.contextmanager
def serving_ssh(hosts: Sequence[Host], folder: Path) -> Iterator[None]:
    """Run sshd on each host within this context, with the files that :func:`prepare_ssh` wrote to ``folder``."""
    with contextlib.ExitStack() as stack:
        for host in hosts:
            process = host.start([_SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], subprocess.DEVNULL, {})
            stack.callback(process.wait)
            stack.callback(process.kill)
        for host in hosts:
            connect = ("ssh", host.name, "true")
            wait_until(lambda: host.start(connect, subprocess.DEVNULL).wait() == 0, 10, lambda: f"sshd of {host.name}")  # noqa: B023
        yield
