"""The configuration files of a private cluster: ``slurm.conf``, GPUs and hosts."""

from __future__ import annotations

import os
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"
NODES = ("n1", "n2", "n3", "n4", "n5", "n6")
WITH_GPUS = NODES[:4]  # a job uses two of them, and others after a loss
# Jobs of the partition high preempt those in low, after a grace period.
PARTITIONS = {
    "gpu": "Nodes=n[1-4] Default=YES",
    "cpu": "Nodes=n5",
    "low": "Nodes=n6 PriorityTier=1 GraceTime=8",
    "high": "Nodes=n6 PriorityTier=2",
}
CPUS, GPUS = 8, 2  # reported by a node; processes are not bound to them

# Short times: a lost node is detected after 15 s (default: 6 minutes), a requeued job waits for 5 s (default: 2
# minutes).
_CONF = """\
ClusterName=private
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldTimeout=30
SlurmdTimeout=10
MessageTimeout=5
TCPTimeout=1
KillWait=10
CompleteWait=0
ReturnToService=2
MinJobAge=3600
JobRequeue=1
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that are currently free."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def address() -> str:
    """Return the machine's address, which its nodes use to communicate; loopback if it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends no packets; the kernel only selects a route
            found: str = probe.getsockname()[0]
        except OSError:
            return LOOPBACK
        return found


def write_settings(folder: Path) -> None:
    """Write the files of a cluster to ``folder``."""
    own, (controller, *ports) = address(), free_ports(1 + len(NODES))
    host = socket.gethostname()
    lines = [_CONF.format(host=host, address=own, port=controller, folder=folder)]
    for name, port in zip(NODES, ports):
        gres = f" Gres=gpu:{GPUS}" if name in WITH_GPUS else ""
        where = f"NodeHostname={name} NodeAddr={own} Port={port}"
        lines.append(f"NodeName={name} {where} CPUs={CPUS} RealMemory=1000{gres} State=UNKNOWN\n")
    lines += [f"PartitionName={name} {rest} MaxTime=2-0 State=UP\n" for name, rest in PARTITIONS.items()]
    (folder / "slurm.conf").write_text("".join(lines))
    (folder / "gres.conf").write_text(f"NodeName={','.join(WITH_GPUS)} Name=gpu File={folder}/gpu[1-{GPUS}]\n")
    for number in range(1, GPUS + 1):
        (folder / f"gpu{number}").touch()
    (folder / "cgroup.conf").write_text("")
    known = "".join(f"{own} {name}\n" for name in (host, *NODES))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
    key = folder / "munge.key"
    key.unlink(missing_ok=True)
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
