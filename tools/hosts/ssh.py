"""A private sshd with its own keys on each of the two hosts, for `deepspeed` with pdsh."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.hosts.network import Host

_PROGRAMS = ("pdsh", "ssh", "ssh-keygen")
_SSHD = "/usr/sbin/sshd"  # it re-executes itself for each connection, which requires its full path
_LIMIT_S = 10.0


def missing() -> str | None:
    """Return what this machine lacks, or None."""
    lacking = [name for name in _PROGRAMS if shutil.which(name) is None]
    if not Path(_SSHD).exists():
        lacking.append("sshd")
    return f"{', '.join(lacking)} not installed (make hosts installs them)" if lacking else None


def prepare(folder: Path) -> None:
    """Write keys and settings, which replace the machine's, before the hosts are created."""
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "user_key.pub").rename(folder / "authorized_keys")
    settings = [
        *("Host *", f"IdentityFile {folder / 'user_key'}", "IdentitiesOnly yes"),
        *("StrictHostKeyChecking no", "UserKnownHostsFile /dev/null", "GlobalKnownHostsFile /dev/null"),
        *("LogLevel ERROR", "BatchMode yes"),
    ]
    (folder / "ssh_config").write_text("\n".join(settings) + "\n", encoding="utf-8")
    served = [
        *(f"HostKey {folder / 'host_key'}", f"AuthorizedKeysFile {folder / 'authorized_keys'}", "PidFile none"),
        *("StrictModes no", "UsePAM no", "PasswordAuthentication no", "PermitRootLogin prohibit-password"),
    ]
    (folder / "sshd_config").write_text("\n".join(served) + "\n", encoding="utf-8")


@contextlib.contextmanager
def serving(hosts: Sequence[Host], folder: Path) -> Iterator[None]:
    """Run sshd on each host within this context, with the files that :func:`prepare` wrote to ``folder``."""
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "sshd.log").open("w", encoding="utf-8"))
        for host in hosts:
            process = host.start([_SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], log, {})
            stack.callback(process.wait)
            stack.callback(process.kill)
        for host in hosts:
            _wait_for(host, folder)
        yield


def _wait_for(host: Host, folder: Path) -> None:
    end = time.monotonic() + _LIMIT_S
    while True:
        try:
            host.run("ssh", host.name, "true")
            return
        except subprocess.CalledProcessError as error:
            if time.monotonic() > end:
                log = (folder / "sshd.log").read_text(encoding="utf-8")
                raise RuntimeError(f"{host.name} is not reachable via ssh: {error.stderr}{log}") from error
            time.sleep(0.1)
