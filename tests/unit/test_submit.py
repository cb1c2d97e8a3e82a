"""``submit``: valid requests, the checks against the cluster, the rendered script, and the output."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from alignment.cli import submit as submit_command
from alignment.cli.slurm.cluster import Node, SlurmError, ask, check_cluster, read_nodes, read_partitions
from alignment.cli.slurm.request import Gpus, Request, add_options, request, seconds, time_text
from alignment.cli.slurm.script import render
from alignment.cli.submit import _parser, main
from alignment.config.errors import OptionError
from alignment.config.registry import METHODS, option_names

TRAIN = ["kto", "--dataset_name", "rows.jsonl", "--output_dir", "out/kto"]
# As SLURM 22.05 prints it, without what is not read.
PARTITIONS = """\
PartitionName=gpu AllowGroups=ALL Default=YES MaxNodes=UNLIMITED MaxTime=2-00:00:00 State=UP TotalCPUs=512 TotalNodes=4
PartitionName=cpu AllowGroups=ALL Default=NO MaxNodes=1 MaxTime=UNLIMITED State=UP TotalCPUs=64 TotalNodes=8
PartitionName=old AllowGroups=ALL Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED State=DOWN TotalNodes=9
"""
NODES = {"gpu": "128|gpu:a100:4(S:0-1)\n64+|gpu:h100:2,gpu:h100:6,shard:8\n", "cpu": "64|(null)\n", "old": "8|gpu:1\n"}
FAKES = {
    "scontrol": 'cat "$FAKE/partitions"; exit $(cat "$FAKE/scontrol.code")',
    "sinfo": 'cat "$FAKE/nodes-$3"',
    "sbatch": 'n=$(ls "$FAKE" | grep -c given); cat >"$FAKE/given-$n"; echo "$@" >>"$FAKE/sbatch.called"; '
    'env | grep ^SBATCH >"$FAKE/sbatch.variables"; cat "$FAKE/sbatch.says" >&2; [[ -s $FAKE/sbatch.says ]] && exit 1; '
    "echo $((40 + n))\\;private",
}


def asked(*arguments: str) -> Request:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return request(parser.parse_args(arguments))


@pytest.fixture(autouse=True)
def no_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SETUP", "CONTAINER", "MOUNTS", "PYTHON"):
        monkeypatch.delenv(f"ALIGNMENT_{name}", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the output of fake SLURM commands, and with the arguments of their calls."""
    folder = tmp_path / "slurm"
    (folder / "bin").mkdir(parents=True)
    for name, body in FAKES.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    files = {"partitions": PARTITIONS, "scontrol.code": "0", "sbatch.says": ""}
    for name, text in {**files, **{f"nodes-{name}": text for name, text in NODES.items()}}.items():
        (folder / name).write_text(text)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE", str(folder))
    return folder


def submitted(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    """Run the command; return its exit status, stdout and stderr."""
    with pytest.raises(SystemExit) as leaving:
        main([*TRAIN, *arguments], program="da submit")
    return leaving.value.code, *capsys.readouterr()


# Requested resources -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected", "normal"),
    [
        ("90", 5400, "01:30:00"), ("5:30", 330, "00:05:30"), ("4:00:00", 14400, "04:00:00"),
        ("1-0", 86400, "1-00:00:00"), ("1-12:30", 131400, "1-12:30:00"), ("2-03:04:05", 183845, "2-03:04:05"),
        ("36:00:00", 129600, "1-12:00:00"),
    ],
)  # fmt: skip
def test_times_in_slurms_notation(text: str, expected: int, normal: str) -> None:
    assert (seconds("--time", text), time_text(expected)) == (expected, normal)


@pytest.mark.parametrize("text", ["", "0", "00:00:00", "4h", "1:2:3:4", "1-", "-5", "1-00:00:00 ", "UNLIMITED", "1.5"])
def test_invalid_times(text: str) -> None:
    with pytest.raises(OptionError, match=r"--time='.*': expected minutes, HH:MM:SS or D-HH:MM:SS"):
        asked(f"--time={text}")


def test_a_complete_request() -> None:
    given = "--nodes 4 --gpus a100:8 --cpus-per-task 12 --mem 500G --time 1-0 --signal SIGUSR1@300 --partition gpu,big"
    found = asked(*given.split(), "--account", "me@lab", "--qos", "high", "--job-name", "x.1", "--array", "1-9:2,20%3")
    assert found == Request(
        *("x.1", 4, Gpus("a100", 8), 12, "500G", 86400, 300, "gpu,big", "me@lab", "high", "1-9:2,20%3")
    )
    assert asked() == Request()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--nodes 0", "--nodes='0': expected an integer of at least 1"),
        ("--nodes two", "--nodes='two': expected an integer of at least 1"),
        ("--cpus-per-task 0", "--cpus-per-task='0': expected an integer of at least 1"),
        ("--gpus a100", "--gpus='a100': expected the GPUs per node"),
        ("--gpus a100:0", "--gpus='a100:0': expected the GPUs per node"),
        ("--mem lots", "--mem='lots': expected a size such as 500G"),
        ("--signal USR3@60", "--signal='USR3@60': unknown signal; set USR1@SECONDS; did you mean 'USR"),
        ("--signal TERM@60", "--signal='TERM@60': a job requeues itself only after USR1; set USR1@60"),
        ("--signal B:USR1@60", "--signal='B:USR1@60': the signal must go to the run itself; set USR1@60"),
        ("--signal USR1", "--signal='USR1': expected the seconds before the time limit, such as USR1@120"),
        ("--signal USR1@0", "--signal='USR1@0': expected the seconds"),
        ("--signal USR1@70000", "--signal='USR1@70000': expected the seconds"),
        ("--signal 120s", "--signal='120s': expected USR1@SECONDS"),
        ("--time 3", "--signal=USR1@120: leaves no time to train within --time=3"),
        ("--partition a;b", "--partition='a;b': expected a name without spaces or quotes"),
        ("--account a$b", "--account='a$b': expected a name"),
        ("--seeds 1..5", "--seeds='1..5': expected integers and ranges"),
        ("--seeds 5-1", "--seeds='5-1': 5-1 is empty; write the smaller number first"),
        ("--container image.sif", "--container='image.sif': expected apptainer:IMAGE or pyxis:IMAGE"),
        ("--mounts /data", "--mounts='/data': has no effect without --container"),
        ("--sbatch=exclusive", "--sbatch='exclusive': expected an sbatch option"),
        ("--sbatch=--nodes=3", "--sbatch='--nodes=3': use --nodes"),
        ("--sbatch=-t5", "--sbatch='-t5': use --time"),
        ("--sbatch=--output=x", "--sbatch='--output=x': the script sets --output itself; remove it"),
    ],
)
def test_what_is_refused(arguments: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        asked(*arguments.split())
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_gpus_of_types_that_begin_with_a_digit() -> None:
    """GPU slices (MIG), and GPU types that are named by a number."""
    for text in ("1g.10gb:1", "1g.10gb+me:2", "3090:4", "rtx_3090-ti:1"):
        kind, _, number = text.partition(":")
        assert asked(f"--gpus={text}").gpus == Gpus(kind, int(number))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("--comment=x --output=/y", "the script sets --output itself; remove it"),
        ("--comment 'a b' -o y", "the script sets --output"),
        ("--requ", "the script sets --requeue"), ("--no-r", "the script sets --no-req"),
        ("--gpus-per-n=2", "use --gpus"), ("--gpus=2", "use --gpus"), ("-G2", "use --gpus"),
        ("--gpus-per-task=1", "use --gpus"), ("--gres=gpu:a100:2", "use --gpus"),
        ("--ntasks-per-gpu=1", "use --gpus"), ("-Hn4", "use --gpus"), ("-HN 4", "use --nodes"),
        ("--parti gpu", "use --partition"), ("--test-only", "nothing would be submitted; use --print"),
        ("-W", "sbatch would not print the job id"), ("-sW", "sbatch would not print"),
        ("--comment='open", "expected an sbatch option, such as --sbatch=--constraint=ib"),
        ("--comment=x\n#SBATCH --nodes=3", "expected an sbatch option"), ("-", "expected an sbatch option"),
    ],
)  # fmt: skip
def test_conflicting_sbatch_options(text: str, says: str) -> None:
    """Also several options in one text, prefixes of names, and combined letters."""
    with pytest.raises(OptionError) as caught:
        asked(f"--sbatch={text}")
    assert str(caught.value).startswith(f"--sbatch={text!r}: {says}")


def test_sbatch_options_that_are_passed_on() -> None:
    given = (
        *(
            "--exclusive",
            "--constraint=ib",
            "-C ib -x n3",
            "--mem-per-cpu=4G",
            "--gres=tmpdisk:100",
            "--wait-all-nodes=1",
        ),
        *("--mail-user=me@x --mail-type=END", "-d afterok:7", "--comment='-t is too short'", "--time-min=60", "-Hv"),
    )
    assert asked(*(f"--sbatch={text}" for text in given)).sbatch == given


def test_options_of_jobs_and_methods_do_not_overlap() -> None:
    own = {action.dest for action in _parser("x")._actions} | {"array"}
    for cls in METHODS.values():
        assert not own & set(option_names(cls))


# What the cluster has -----------------------------------------------------------------------------------------------


def test_parsing_slurms_output() -> None:
    gpu, cpu, old = read_partitions(PARTITIONS)
    assert (gpu.name, gpu.nodes, gpu.time, gpu.up, gpu.default) == ("gpu", 4, 172800, True, True)
    assert (cpu.nodes, cpu.time, cpu.default, old.up) == (1, None, False, False)
    assert read_nodes(NODES["gpu"]) == [Node(128, {"a100": 4}), Node(64, {"h100": 8})]
    assert read_nodes("8|gpu:2\n8|(null)") == [Node(8, {"": 2}), Node(8, {})]


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Request(nodes=5), "--nodes=5: the partition gpu allows at most 4 per job; set --nodes 4"),
        (Request(nodes=2, partition="cpu", gpus=Gpus("", 0)), "--nodes=2: the partition cpu allows at most 1 per job"),
        (Request(partition="gpus"), "--partition='gpus': unknown partition; set one of gpu, cpu"),
        (Request(partition="gpu,new"), "--partition='new': unknown partition"),
        (Request(partition="old"), "--partition='old': the partition is not up"),
        (Request(time=172801), "--time=2-00:00:01: the partition gpu allows at most 2-00:00:00"),
        (Request(gpus=Gpus("", 9)), "--gpus=9: the nodes of partition gpu have at most 8; set"),
        (Request(gpus=Gpus("a100", 5)), "--gpus=a100:5: the nodes of partition gpu have at most 4 of type a100 ("),
        (Request(gpus=Gpus("v100", 1)), "--gpus=v100:1: the nodes of partition gpu have at most 0 of type v100 "
         "(available types: a100, h100); set --gpus to the GPUs per node"),
        (Request(partition="cpu"), "--gpus=1: the nodes of partition cpu have at most 0;"),
        (Request(gpus=Gpus("h100", 8), cpus=9), "--cpus-per-task=9: the 8 ranks of a node need 72 cores, but the "
         "nodes of partition gpu have 64; set --cpus-per-task 8"),
    ],
)  # fmt: skip
def test_requests_that_exceed_the_partition(slurm: Path, job: Request, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_cluster(job)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_requests_that_fit(slurm: Path) -> None:
    for job in (
        Request(4 * "x", 4, Gpus("h100", 8), time=172800),
        Request(partition="cpu", gpus=Gpus("", 0), cpus=64),
    ):
        check_cluster(job)


@pytest.mark.parametrize(
    ("last", "beyond"),
    [
        ("--nodes=1", "--nodes=0"),
        ("--nodes=999999", "--nodes=1000000"),
        ("--gpus=9999", "--gpus=10000"),
        ("--gpus=0", "--gpus=a100:0"),
        ("--gpus=a100:1", "--gpus=a100:"),
        ("--mem=0", "--mem=-1"),
        ("--signal=USR1@1", "--signal=USR1@0"),
        ("--signal=10@60 --time=1-0", "--signal=12@60 --time=1-0"),
        ("--signal=USR1@65535 --time=2-0", "--signal=USR1@65536 --time=2-0"),
        ("--seeds=5-5", "--seeds=5-4"),
        ("--seeds=1-3:2,7%2", "--seeds=1-3:2,7-6%2"),
        ("--time=2 --signal=USR1@59", "--time=0"),
    ],
)
def test_values_of_a_job_at_their_limits(last: str, beyond: str) -> None:
    asked(*last.split())
    with pytest.raises(OptionError, match=f"^{beyond.split('=')[0]}="):
        asked(*beyond.split())


@pytest.mark.parametrize(("minutes", "enough"), [("2:59", False), ("3:00", False), ("3:01", True)])
def test_a_signal_leaves_time_to_train(minutes: str, enough: bool) -> None:
    """SLURM may send it a minute early."""
    with contextlib.nullcontext() if enough else pytest.raises(OptionError, match="^--signal="):
        asked(f"--time={minutes}", "--signal=USR1@120")


@pytest.mark.parametrize(
    ("job", "fits"),
    [
        (Request(nodes=4), True), (Request(nodes=5), False),
        (Request(time=172800), True), (Request(time=172801), False),
        (Request(gpus=Gpus("a100", 4)), True), (Request(gpus=Gpus("a100", 5)), False),
        (Request(gpus=Gpus("a100", 4), cpus=32), True), (Request(gpus=Gpus("a100", 4), cpus=33), False),
        (Request(partition="cpu", gpus=Gpus("", 0), cpus=64), True),
        (Request(partition="cpu", gpus=Gpus("", 0), cpus=65), False),
    ],
)  # fmt: skip
def test_jobs_that_just_fit(slurm: Path, job: Request, fits: bool) -> None:
    with contextlib.nullcontext() if fits else pytest.raises(OptionError):
        check_cluster(job)


def test_the_partition_of_the_environment(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch uses it for a job without a partition."""
    monkeypatch.setenv("SBATCH_PARTITION", "cpu")
    check_cluster(Request(gpus=Gpus("", 0), time=3 * 86400))
    check_cluster(Request(partition="gpu"))
    monkeypatch.setenv("SBATCH_PARTITION", "gpus")
    with pytest.raises(OptionError, match="^SBATCH_PARTITION='gpus': unknown partition; .*did you mean 'gpu'"):
        check_cluster(Request())


def test_no_default_partition(slurm: Path) -> None:
    (slurm / "partitions").write_text(PARTITIONS.replace("Default=YES", "Default=NO"))
    with pytest.raises(OptionError, match="the cluster has no default partition; set --partition to one of gpu, cpu"):
        check_cluster(Request())


def test_slurm_does_not_respond(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (slurm / "scontrol.code").write_text("1")
    (slurm / "bin" / "scontrol").write_text("#!/bin/bash\necho slurm_load: Unable to contact >&2\necho >&2\nexit 1\n")
    with pytest.raises(SlurmError, match="^scontrol show partition: slurm_load: Unable to contact$"):
        check_cluster(Request())
    monkeypatch.setattr("alignment.cli.slurm.cluster._LIMIT_S", 0.1)
    with pytest.raises(SlurmError, match=r"^sleep 5: no response within 0\.1 s; check that SLURM's controller is up$"):
        ask("sleep", "5")
    with pytest.raises(SlurmError, match="^nothing-of-that-name: No such file or directory$"):
        ask("nothing-of-that-name")


# The script ---------------------------------------------------------------------------------------------------------


def header(script: str) -> dict[str, str]:
    found = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    return dict(part.partition("=")[::2] for part in found)


def test_every_value_of_the_header_is_resolved(tmp_path: Path) -> None:
    job = Request(
        "x", 4, Gpus("a100", 8), 12, "500G", 86400, 300, "gpu", "lab", "high", "1-3", sbatch=("--exclusive",)
    )
    script = render(job, ["kto"], log=tmp_path / "a b-%j.out", folder=tmp_path)
    assert header(script) == {
        "job-name": "x", "nodes": "4", "ntasks-per-node": "8", "gpus-per-node": "a100:8", "cpus-per-task": "12",
        "mem": "500G", "time": "1-00:00:00", "partition": "gpu", "account": "lab", "qos": "high", "array": "1-3",
        "signal": "USR1@300", "chdir": str(tmp_path), "output": f'"{tmp_path}/a b-%j.out"', "requeue": "",
        "open-mode": "append", "exclusive": "",
    }  # fmt: skip
    assert not [
        line for line in script.splitlines() if line.startswith("#SBATCH") and ("$" in line or "=None" in line)
    ]
    first = next(number for number, line in enumerate(script.splitlines()) if line and not line.startswith("#"))
    assert not [line for line in script.splitlines()[first:] if line.startswith("#SBATCH")]  # sbatch would not see it
    plain = header(render(Request(gpus=Gpus("", 0)), ["kto"], log=Path("x"), folder=tmp_path))
    assert plain["ntasks-per-node"] == "1"
    assert not {"gpus-per-node", "mem", "partition", "account", "qos", "array"} & set(plain)
    with pytest.raises(OptionError, match="sbatch does not support paths with quotes"):
        render(job, ["kto"], log=Path('a"b'), folder=tmp_path)


def test_arguments_and_variables_are_passed_unchanged(tmp_path: Path) -> None:
    arguments = ["kto", "--dataset_name", "a b's.jsonl", "--deepspeed", '{"a": "$HOME `x`"}']
    job = Request(setup="echo 'from setup'; export X=\"1 2\"")
    script = render(job, arguments, log=tmp_path / "x", folder=tmp_path).replace(
        'main "$@"', 'printf "%s\\n" "$@"; env'
    )
    env = {"PATH": "/usr/bin:/bin", "ALIGNMENT_CONTAINER": "apptainer:left_over", "PYTHONPATH": "/own"}
    done = subprocess.run(["bash"], input=script, env=env, text=True, capture_output=True, check=True)
    (tmp_path / "script").write_text(script)
    done = subprocess.run(["bash", tmp_path / "script"], env=env, text=True, capture_output=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[:5] == arguments and done.stderr == ""
    variables = dict(line.partition("=")[::2] for line in lines[5:])
    assert variables["ALIGNMENT_SETUP"] == job.setup and "ALIGNMENT_CONTAINER" not in variables
    assert (variables["ALIGNMENT_PYTHON"], variables["PYTHONPATH"]) == (sys.executable, f"{ROOT}:/own")
    assert (variables["ALIGNMENT_STOP_NOTICE"], variables["ALIGNMENT_COMMAND"]) == ("120", "train")


# The command --------------------------------------------------------------------------------------------------------


def test_print_needs_no_slurm_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    code, out, err = submitted(capsys, "--print", "--nodes", "3", "--beta", "0.2")
    assert (code, err) == (0, "") and out.startswith("#!/bin/bash\n#SBATCH --job-name=alignment\n#SBATCH --nodes=3\n")
    assert (
        f"#SBATCH --output={tmp_path}/out/kto-%j.out\n" in out
        and "\nset -- kto " in out
        and "--beta 0.2 --output_dir out/kto\n" in out
    )
    assert list(tmp_path.iterdir()) == []


def test_no_token_in_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*TRAIN, "--push_to_hub", "--hub_token", "hf_mine", "--gpus", "1", "--time", "1:00:00", "--print"])
    said = capsys.readouterr()
    assert ended.value.code == 1 and said.err.startswith("error: --hub_token=<hidden>: SLURM stores")
    assert "hf_mine" not in said.out + said.err


def test_a_job_is_submitted_and_described(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    monkeypatch.setenv("SBATCH_ACCOUNT", "own")
    code, out, err = submitted(capsys, "--nodes", "2", "--gpus", "8", "--cpus-per-task", "4", "--time", "1-0")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "submitted job 40: 2 nodes with 8 GPUs each",
        f"  follow   da status {tmp_path}/out/kto",
        f"  log      tail -F {tmp_path}/out/kto-40.out",
        f"  stop     touch {tmp_path}/out/kto/STOP    (saves a checkpoint)",
        "  cancel   scancel 40    (saves a checkpoint if SLURM's KillWait is long enough)",
        "  resume   run the same command again",
    ]
    assert header((slurm / "given-0").read_text())["nodes"] == "2"
    assert (slurm / "sbatch.called").read_text() == "--parsable\n"
    assert (slurm / "sbatch.variables").read_text() == "SBATCH_ACCOUNT=own\n"
    assert (tmp_path / "out").is_dir()
    assert list((tmp_path / "out").iterdir()) == []


def test_sbatch_variables_do_not_override_options(
    slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """sbatch gives them precedence over the lines of a script."""
    contradicting = (
        "ACCOUNT ARRAY_INX CONSTRAINT CPUS_PER_GPU GPUS GPUS_PER_NODE GPUS_PER_TASK GRES JOB_NAME MEM_PER_CPU "
        "MEM_PER_GPU MEM_PER_NODE NO_REQUEUE OPEN_MODE OUTPUT PARTITION QOS REQUEUE REQ_SWITCH SIGNAL TIMELIMIT WAIT"
    ).split()
    for name in contradicting:
        monkeypatch.setenv(f"SBATCH_{name}", "gpu:1" if name == "GRES" else "1")
    monkeypatch.setenv("SBATCH_RESERVATION", "ours")
    job = ("--partition", "gpu", "--account", "lab", "--qos", "high", "--mem", "5G", "--cpus-per-task", "1")
    code, _, err = submitted(capsys, *job, "--sbatch=-C ib --switches=1")
    assert (code, err) == (0, "") and (slurm / "sbatch.variables").read_text() == "SBATCH_RESERVATION=ours\n"
    kept = {"ACCOUNT": "own", "PARTITION": "gpu", "QOS": "low", "MEM_PER_CPU": "4G", "GRES": "tmpdisk:5"}
    for name, value in kept.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    monkeypatch.delenv("SBATCH_MEM_PER_GPU"), monkeypatch.delenv("SBATCH_MEM_PER_NODE")
    monkeypatch.delenv("SBATCH_CONSTRAINT"), monkeypatch.delenv("SBATCH_REQ_SWITCH")
    assert submitted(capsys, "--cpus-per-task", "1")[0] == 0
    lines = [f"SBATCH_{name}={value}" for name, value in {**kept, "RESERVATION": "ours"}.items()]
    assert sorted((slurm / "sbatch.variables").read_text().split()) == sorted(lines)


def test_seeds(slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = submitted(capsys, "--seeds", "1-3", "--cpus-per-task", "1")
    assert code == 0 and f"follow   da status {tmp_path}/out/kto/seed-N\n" in out
    assert f"log      tail -F {tmp_path}/out/kto-40_N.out\n" in out
    assert header((slurm / "given-0").read_text())["output"] == f"{tmp_path}/out/kto-%A_%a.out"


def test_prepare_comes_first(slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--prepare", "--prepare-partition", "cpu", "--prepare-time", "30", "--gpus", "8", "--nodes", "4"]
    code, out, err = submitted(capsys, *more, "--seeds", "1-2", "--partition", "gpu")
    assert (
        (code, err) == (0, "")
        and out.startswith("submitted job 41: 4 nodes")
        and "  after    preparation job 40" in out
    )
    first, second = ((slurm / f"given-{number}").read_text() for number in (0, 1))
    assert {"nodes": "1", "ntasks-per-node": "1", "partition": "cpu", "time": "00:30:00"}.items() <= header(
        first
    ).items()
    assert not {"array", "gpus-per-node", "signal"} & set(header(first))
    assert header(first)["output"] == f"{tmp_path}/out/kto-prepare-%j.out"
    assert " --ranks 32\n" in first and "--ranks" not in second and "DS_ACCELERATOR" not in first + second
    assert "export ALIGNMENT_COMMAND=prepare\n" in first and "export ALIGNMENT_COMMAND=train\n" in second
    called = (slurm / "sbatch.called").read_text().splitlines()
    assert called == ["--parsable", "--parsable --dependency=afterok:40 --kill-on-invalid-dep=yes"]
    _, out, _ = submitted(capsys, *more, "--gpus", "0", "--print")
    assert out.count("export DS_ACCELERATOR=cpu\n") == 2 and " --ranks 4\n" in out
    code, out, _ = submitted(capsys, *more, "--print")
    assert code == 0 and out.count("#!/bin/bash") == 2 and "--dependency=afterok:PREPARATION_JOB_ID" in out


def test_options_for_gpu_nodes_do_not_apply_to_the_preparation_job(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--prepare", "--account", "lab", "--qos", "gpu", "--mem", "500G", "--sbatch=--constraint=ib"]
    own = ["--prepare-partition", "cpu", "--prepare-sbatch=--qos=cpu --mem=8G", "--prepare-sbatch=--exclusive"]
    assert submitted(capsys, *more, *own, "--cpus-per-task", "1")[0] == 0
    first, second = (header((slurm / f"given-{number}").read_text()) for number in (0, 1))
    assert {"account": "lab", "qos": "cpu --mem=8G", "exclusive": ""}.items() <= first.items()
    assert not {"constraint", "mem"} & set(first)
    assert {"account": "lab", "qos": "gpu", "mem": "500G", "constraint": "ib"}.items() <= second.items()
    assert "exclusive" not in second


def test_seeds_are_prepared_in_the_folder_of_the_first(
    slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their common parent folder is not the output folder of a run, and could not be prepared a second time."""
    more = ("--prepare", "--prepare-partition", "cpu", "--cpus-per-task", "1")
    assert submitted(capsys, *more, "--seeds", "03-5,1%2")[0] == 0
    first, second = ((slurm / f"given-{number}").read_text() for number in (0, 1))
    assert " --seed 3 --output_dir out/kto/seed-3 --ranks 1\n" in first and "--output_dir out/kto " not in first
    assert "\nset -- kto --dataset_name rows.jsonl --output_dir out/kto\n" in second


@pytest.mark.parametrize("scancel", [0, 1])
def test_the_training_job_is_rejected(slurm: Path, capsys: pytest.CaptureFixture[str], scancel: int) -> None:
    """The preparation job is cancelled."""
    sbatch = slurm / "bin" / "sbatch"
    refuses = '[[ $* == *afterok* ]] && echo "sbatch: error: Invalid qos" >&2 && exit 1'
    sbatch.write_text(f"#!/bin/bash\n{refuses}\n{FAKES['sbatch']}\n")
    (slurm / "bin" / "scancel").write_text(
        f'#!/bin/bash\necho "$@" >>"$FAKE/scancel.called"\necho no answer >&2\nexit {scancel}\n'
    )
    (slurm / "bin" / "scancel").chmod(0o755)
    code, out, err = submitted(capsys, "--prepare", "--prepare-partition", "cpu", "--cpus-per-task", "1")
    ends = (
        "its preparation job 40 was cancelled",
        "could not cancel its preparation job 40 (scancel 40: no answer); run scancel 40",
    )
    assert (code, out, (slurm / "scancel.called").read_text()) == (1, "", "40\n")
    assert err == f"error: sbatch --parsable --dependency=afterok:40: sbatch: error: Invalid qos; {ends[scancel]}\n"


def test_ctrl_c(slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cancelled: list[str] = []

    def interrupted(*arguments: str) -> str:
        if len(arguments) == 1:
            return "40"
        raise KeyboardInterrupt

    monkeypatch.setattr(submit_command, "submit", interrupted)
    monkeypatch.setattr(submit_command, "cancel", cancelled.append)
    code, out, err = submitted(capsys, "--prepare", "--prepare-partition", "cpu", "--cpus-per-task", "1")
    assert (code, out, cancelled) == (130, "", ["40"]) and err == (
        "interrupted while calling sbatch: check `squeue --me` for a submitted job; its preparation job "
        "40 was cancelled\n"
    )
    monkeypatch.setattr(submit_command, "check_cluster", interrupted)
    monkeypatch.setattr(submit_command, "check_cluster", lambda job: interrupted("", ""))
    code, out, err = submitted(capsys)
    assert (code, out, err) == (130, "", "interrupted: nothing was submitted\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--beta -1", "beta=-1.0: must be greater than 0"),
        ("--bata 1", "bata='1': unknown option; did you mean 'beta'?"),
        ("--time", "command line: argument --time: expected one argument; --help lists the options"),
        ("--seeds 1-2 --seed 4", "--seed=4: --seeds sets the seed of each run; remove --seed"),
        ("--overwrite_output_dir true", "overwrite_output_dir=true: a requeued job resumes its own run"),
        ("--prepare-time 5", "--prepare-time='5': has no effect without --prepare; add --prepare or remove it"),
        ("--prepare-sbatch=-H", "--prepare-sbatch=['-H']: has no effect without --prepare; add --prepare"),
        ("--prepare --prepare-sbatch=--time=5", "--prepare-sbatch='--time=5': use --prepare-time"),
        ("--prepare --prepare-sbatch=-N2", "--prepare-sbatch='-N2': the job runs one task on one node; remove it"),
        ("--prepare --sbatch=--dep=singleton", "--sbatch='--dep=singleton': with --prepare, the job depends on "
         "the preparation job; set --prepare-sbatch=--dep=singleton"),
        ("--save_strategy no", "save_strategy='no': a requeued job resumes from its newest checkpoint"),
        ("--save_only_model", "save_only_model=True: a requeued job resumes from its newest checkpoint"),
        ("--seeds 1-2 --use_peft --merged_output_dir m", "merged_output_dir='m': all runs of --seeds would write"),
        ("--nodes 9", "--nodes=9: the partition gpu allows at most 4 per job"),
    ],
)  # fmt: skip
def test_errors_are_found_before_submitting(
    slurm: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    code, out, err = submitted(capsys, *arguments.split())
    assert (code, out, err.count("\n")) == (1, "", 1) and err.startswith(f"error: {message}"), err
    assert not (slurm / "sbatch.called").exists()


def test_a_step_is_counted_over_all_ranks_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    """KTO rejects one row per step, but not one row per rank on several ranks."""
    least = ("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "1")
    assert submitted(capsys, "--print", "--nodes", "2", *least)[0] == 0
    code, _, err = submitted(capsys, "--print", *least)
    assert code == 1 and "at least two rows" in err


def test_an_invalid_recipe(slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.yaml").write_text("method: kto\nbeta: [\n")
    with pytest.raises(SystemExit) as leaving:
        main(["own.yaml", "--output_dir", "out"])
    out, err = capsys.readouterr()
    assert (leaving.value.code, out, err.count("\n")) == (1, "", 1) and err.startswith(
        "error: own.yaml, line 3: invalid"
    )
    assert not (slurm / "sbatch.called").exists()


def test_the_recipes_folder_is_named_to_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.yaml").write_text(
        "method: kto\ndataset_name: rows.jsonl\nsaving: {output_dir: runs/a}\nmodel_name_or_path: m\n"
    )
    with pytest.raises(SystemExit) as leaving:
        main(["own.yaml", "--print"])
    out, _ = capsys.readouterr()
    assert leaving.value.code == 0 and "\nset -- own.yaml --output_dir runs/a\n" in out


def test_resume_options_are_passed_to_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a value, the script decides; it does not parse recipes like Python."""
    (tmp_path / "own.yaml").write_text(
        "{method: kto, dataset_name: rows.jsonl, output_dir: ~/a, model_name_or_path: m}\n"
    )
    (tmp_path / "old.yaml").write_text(
        (tmp_path / "own.yaml").read_text().replace("~/a", "b, resume_from_checkpoint: c")
    )
    for arguments, expected in {
        "own.yaml --resume_from_checkpoint --beta 0.2": "own.yaml --beta 0.2 --output_dir HOME/a",
        "own.yaml --output_dir=~/b": "own.yaml --output_dir HOME/b",
        "own.yaml --output_dir b --resume_from_checkpoint=c": "own.yaml --resume_from_checkpoint c --output_dir b",
        "old.yaml --resume_from_checkpoint False": "old.yaml --resume_from_checkpoint false --output_dir b",
        "old.yaml": "old.yaml --resume_from_checkpoint c --output_dir b",
    }.items():
        with pytest.raises(SystemExit) as leaving:
            main([*arguments.split(), "--print"])
        out, err = capsys.readouterr()
        assert (leaving.value.code, err) == (0, "")
        assert f"\nset -- {expected.replace('HOME', os.path.expanduser('~'))}\n" in out


OUTSIDE = """
import os
from dataclasses import dataclass
from alignment.config.fields import option
from alignment.methods.sft_options import SFTConfig

@dataclass(kw_only=True)
class Options(SFTConfig):
    method = "own"
    odds: float = option(0.5, "An option that no other method has.")

class Trainer:
    config_class = Options

os.environ["SET_BY_A_LIBRARY"] = "1"
"""


def test_a_third_party_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(OUTSIDE)
    given = shlex.split("--method own.py:Trainer --model_name_or_path m --dataset_name rows.jsonl --output_dir out")
    for odds, code, said in (
        ("0.3", 0, " --odds 0.3 --output_dir out\n"),
        ("high", 1, "odds='high': expected a number"),
    ):
        with pytest.raises(SystemExit) as leaving:
            main([*given, "--odds", odds, "--print"])
        assert leaving.value.code == code and said in "".join(capsys.readouterr())
    assert "SET_BY_A_LIBRARY" not in os.environ, "it would be in that of the job"


def test_no_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    code, out, err = submitted(capsys)
    assert (code, out) == (1, "") and err.startswith("error: sbatch is not on PATH; submit from a login node")
    assert list(tmp_path.iterdir()) == []


def test_sbatch_rejects_the_job(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (slurm / "sbatch.says").write_text("sbatch: error: Batch job submission failed: Invalid account\n")
    code, out, err = submitted(capsys, "--cpus-per-task", "1")
    assert (code, out) == (1, "")
    assert err == "error: sbatch --parsable: sbatch: error: Batch job submission failed: Invalid account\n"


# The documentation --------------------------------------------------------------------------------------------------


def documented() -> list[str]:
    """Return the commands of docs/guides/slurm.md, each on a single line."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "guides" / "slurm.md").read_text(), re.DOTALL)
    for block in blocks:
        assert subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, check=True).stderr == ""
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def test_the_documented_commands_render_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    start = "deepspeed-alignment submit "
    commands = [shlex.split(line, comments=True)[2:] for line in documented() if line.startswith(start)]
    assert len(commands) == 4
    for arguments in commands:
        with pytest.raises(SystemExit) as leaving:
            main([*arguments, "--print"])
        out, err = capsys.readouterr()
        assert (leaving.value.code, err) == (0, "") and out.count("#!/bin/bash") == 1 + ("--prepare" in arguments)


def test_the_documented_tables_have_complete_rows() -> None:
    """A `|` in a cell would split it."""
    columns = 0
    for line in (ROOT / "docs" / "guides" / "slurm.md").read_text().splitlines():
        columns = (columns or line.count("|")) if line.startswith("|") else 0
        assert line.count("|") == columns or not columns, line


def test_the_documented_settings_of_nccl_reach_the_run() -> None:
    """Each as it stands there, in one setup; `scontrol` names the nodes."""
    lines = (ROOT / "docs" / "guides" / "slurm.md").read_text().splitlines()
    settings = [line.split("`")[1] for line in lines if re.match(r"\| `[A-Z_]+=", line)]
    assert len(settings) == 7
    script = (ROOT / "launch" / "slurm" / "train.sbatch").read_text().replace('main "$@"', "prepare_environment; env")
    env = {"PATH": "/usr/bin:/bin", "ALIGNMENT_SETUP": "\n".join(["scontrol() { echo n1; echo n2; }", *settings])}
    script = re.sub(r"\[\[ \$\{BASH_SOURCE.* \|\| ", "", script)
    done = subprocess.run(["bash"], input=script, env=env, text=True, capture_output=True, check=True)
    told = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    expected = dict(setting.partition("=")[::2] for setting in settings) | {"MASTER_ADDR": "n1-ib"}
    assert {name: told.get(name) for name in expected} == expected and done.stderr == ""


def test_every_variable_of_the_script_is_documented_at_its_head() -> None:
    text = (ROOT / "launch" / "slurm" / "train.sbatch").read_text()
    head = text[: text.index("\nsay()")]
    used = set(re.findall(r"ALIGNMENT_[A-Z_]+", text))
    assert used == set(re.findall(r"^# (ALIGNMENT_[A-Z_]+) ", head, re.MULTILINE))
    assert set(re.findall(r"ALIGNMENT_[A-Z_]+", (ROOT / "docs" / "guides" / "slurm.md").read_text())) <= used


def test_submit_does_not_import_torch(tmp_path: Path) -> None:
    code = f"import sys; from alignment.cli.commands import main\ntry: main({['submit', *TRAIN, '--print']!r})\n"
    code += "except SystemExit as end: assert not end.code\nassert 'torch' not in sys.modules"
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("#!/bin/bash")
