"""Invalid environments and folders for ``test_bad_input``."""

from __future__ import annotations

from typing import Any

from support.bad_case import Case, file_of, folder_of

TORCHRUN: dict[str, str | None] = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
SRUN: dict[str, str | None] = {"SLURM_JOB_ID": "40123", "SLURM_STEP_ID": "2", "SLURM_PROCID": "0"}
SRUN |= {"SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n1"}
LATEST = {"resume_from_checkpoint": "latest"}


def launched(says: str, launcher: dict[str, str | None] = TORCHRUN, **variables: str | None) -> Case:
    """An environment of a launcher in which these variables replace valid ones."""
    name = f"environment: {' '.join(f'{key}={value}'[:40] for key, value in variables.items())}"
    return Case(name, (says,), environment={**launcher, **variables})


def folder(name: str, make: Any, *says: str, **options: str) -> Case:
    """A path in the output folder, or a replacement for the folder."""
    return Case(f"folder: {name}", says, {**options}, make=make)


def manifest(name: str, content: str | bytes, *says: str) -> Case:
    """A checkpoint with this manifest."""
    make = file_of("out/checkpoint-4/manifest.json", content)
    return Case(f"manifest: {name}", ("can be resumed from: @out/checkpoint-4", *says), dict(LATEST), make=make)


ENVIRONMENT = [
    launched("RANK='first' in the environment: expected an integer", RANK="first"),
    launched("RANK='1' in the environment: expected an integer from 0 to 0", RANK="1"),
    launched("WORLD_SIZE='0' in the environment", WORLD_SIZE="0"),
    launched("WORLD_SIZE='999", WORLD_SIZE="9" * 5000),
    launched("LOCAL_RANK is not set", LOCAL_RANK=""),
    launched("MASTER_PORT='99999' in the environment", WORLD_SIZE="2", MASTER_PORT="99999"),
    launched("MASTER_ADDR is not set", WORLD_SIZE="2", MASTER_ADDR=""),
    launched("ALIGNMENT_STOP_NOTICE='soon' in the environment", ALIGNMENT_STOP_NOTICE="soon"),
    launched("DEEPSPEED_TIMEOUT='0' in the environment", DEEPSPEED_TIMEOUT="0"),
    launched("DS_ACCELERATOR=gpu, but", DS_ACCELERATOR="gpu"),
    launched("RANK='first' in the environment", SRUN, SLURM_PROCID="first"),
    launched("SLURM_LOCALID is not set", SRUN, SLURM_LOCALID=None),
    launched("SLURM_JOB_ID='mine' in the environment", SRUN, SLURM_JOB_ID="mine"),
    Case("environment: mpirun", ("OMPI_COMM_WORLD_SIZE=4: mpirun",), environment={"OMPI_COMM_WORLD_SIZE": "4"}),
    Case(
        "environment: export",
        ("must run in a single process, but WORLD_SIZE is two",),
        arguments=("@a", "@b"),
        environment={**TORCHRUN, "WORLD_SIZE": "two"},
        command="alignment.cli.export",
    ),
]

FOLDERS = [
    folder("a link to itself", lambda at, models: (at / "out").symlink_to("out"), "@out is not a folder"),
    folder("a device", None, "/dev/null is not a folder", output_dir="/dev/null"),
    folder("a name too long", None, "File name too long", output_dir="@" + "a" * 300),
    folder("its lock a folder", folder_of("out/.lock"), "cannot be locked: Is a directory", **LATEST),
    folder("its log a folder", folder_of("out/log.jsonl"), "@out/log.jsonl: Is a directory", **LATEST),
    folder("its status a folder", folder_of("out/status.json"), "@out/status.json must be a file", **LATEST),
    folder("STOP a folder", folder_of("out/STOP"), "@out/STOP must be a file", **LATEST),
    folder("a checkpoint that is a file", file_of("out/checkpoint-4", ""), "@out is not empty", **LATEST),
    folder("an empty checkpoint", folder_of("out/checkpoint-4"), "it has no manifest.json", **LATEST),
    folder("no such checkpoint", None, "no such folder", resume_from_checkpoint="5"),
    Case(
        "folder: export to NUL",
        ("out='", "contains a NUL character"),
        arguments=("@data.jsonl", "@a\0b"),
        command="alignment.cli.export",
    ),
    Case("folder: status of nothing", ("no such folder",), arguments=("@x",), command="alignment.cli.status"),
    Case(
        "folder: status of a device",
        ("/dev/null: no such",),
        arguments=("/dev/null",),
        command="alignment.cli.status",
    ),
]

MANIFESTS = [
    manifest("null", "null", "cannot be read"),
    manifest("binary", bytes(range(256)), "cannot be read"),
    manifest("nested", "[" * 9000, "cannot be read"),
    manifest("without a format", "{}", "cannot be read"),
    manifest("format a word", '{"format": "1"}', "the content does not match its checksum"),
    Case(
        "manifest: a folder",
        ("not a checkpoint, because it has no manifest.json",),
        dict(LATEST),
        make=folder_of("out/checkpoint-4/manifest.json"),
    ),
]
