"""A private sshd with its own keys on each of the two hosts, for `deepspeed` with pdsh."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.hosts.network import Host
from tools.ranks.process import wait_until

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
    """Return what this machine lacks, or None."""
    lacking = [name for name in ("pdsh", "ssh", "ssh-keygen", _SSHD) if shutil.which(name) is None]
    return f"{', '.join(lacking)} not installed (make hosts installs them)" if lacking else None


def prepare(folder: Path) -> None:
    """Write keys and settings, which replace the machine's, before the hosts are created."""
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    for name, text in (("ssh_config", _CLIENT), ("sshd_config", _SERVER)):
        (folder / name).write_text(text.format(folder=folder), encoding="utf-8")


@contextlib.contextmanager
def serving(hosts: Sequence[Host], folder: Path) -> Iterator[None]:
    """Run sshd on each host within this context, with the files that :func:`prepare` wrote to ``folder``."""
    with contextlib.ExitStack() as stack:
        for host in hosts:
            process = host.start([_SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], subprocess.DEVNULL, {})
            stack.callback(process.wait)
            stack.callback(process.kill)
        for host in hosts:
            connect = ("ssh", host.name, "true")
            wait_until(lambda: host.start(connect, subprocess.DEVNULL).wait() == 0, 10, lambda: f"sshd of {host.name}")  # noqa: B023
        yield
