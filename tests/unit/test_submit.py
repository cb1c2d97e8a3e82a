"""``submit``: the job that it describes, its script, what sbatch is asked, and the output. SLURM is simulated here."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from alignment.cli import slurm as slurm_module
from alignment.cli import submit as submit_command
from alignment.cli.submit import _parser, main
from alignment.config.registry import METHODS, option_names

TRAIN = ["kto", "--dataset_name", "rows.jsonl", "--output_dir", "out/kto"]
# Records its arguments and variables; the first job is 40. `refuses` holds a pattern of the arguments that it rejects.
SBATCH = """#!/bin/bash
echo "$@" >>"$FAKE/called"
[[ $* =~ $(cat "$FAKE/refuses") ]] && echo "sbatch: error: Invalid qos" >&2 && exit 1
[[ $1 == --test-only ]] && exit
n=$(ls "$FAKE" | grep -c given)
cat >"$FAKE/given-$n"
echo $((40 + n))\\;private
"""


@pytest.fixture(autouse=True)
def no_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SETUP", "CONTAINER", "MOUNTS", "PYTHON"):
        monkeypatch.delenv(f"ALIGNMENT_{name}", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").touch()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a fake ``sbatch`` and ``scancel``, with the arguments of their calls."""
    folder = tmp_path / "slurm"
    (folder / "bin").mkdir(parents=True)
    scancel = '#!/bin/bash\necho "scancel $@" >>"$FAKE/called"\n'
    for name, text in {"sbatch": SBATCH, "scancel": scancel}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / "refuses").write_text("nothing")
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE", str(folder))
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    """Run the command; return its exit status, stdout and stderr."""
    with pytest.raises(SystemExit) as leaving:
        main(list(arguments), program="da submit")
    return leaving.value.code, *capsys.readouterr()


def header(script: str) -> dict[str, str]:
    words = [shlex.split(line)[1:] for line in script.splitlines() if line.startswith("#SBATCH ")]
    return dict(word.removeprefix("--").partition("=")[::2] for line in words for word in line)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what ``--print`` shows."""
    code, out, err = run(capsys, "--print", *TRAIN, *arguments)
    assert (code, err) == (0, "")
    return out


# The job and its script ----------------------------------------------------------------------------------------------


def test_every_value_of_the_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = "--nodes 4 --gpus a100:8 --cpus-per-task 12 --mem 500G --time 1-0 --signal USR1@300 --partition gpu,big"
    more = ["--account", "me@lab", "--qos", "high", "--job-name", "x 1", "--array", "1-9:2%3", "--sbatch=--exclusive"]
    script = printed(capsys, *job.split(), *more, "--", "--constraint=ib", "--comment", "a 'b' #c")
    own = {
        "job-name": "x 1", "nodes": "4", "ntasks-per-node": "8", "gpus-per-node": "a100:8", "cpus-per-task": "12",
        "mem": "500G", "time": "1-0", "partition": "gpu,big", "account": "me@lab", "qos": "high", "array": "1-9:2%3",
        "signal": "USR1@300", "chdir": str(tmp_path), "output": f"{tmp_path}/out/kto-%A_%a.out", "requeue": "",
        "open-mode": "append",
    }  # fmt: skip
    passed_on = {"exclusive": "", "constraint": "ib", "comment": "", "a 'b' #c": ""}
    assert header(script) == own | passed_on
    exports = {f"ALIGNMENT_PYTHON={sys.executable}", "ALIGNMENT_COMMAND=train", "ALIGNMENT_STOP_NOTICE=300"}
    assert {f"export {each}" for each in exports} < set(script.splitlines())
    assert "unset ALIGNMENT_SETUP ALIGNMENT_CONTAINER ALIGNMENT_MOUNTS\n" in script
    plain = header(printed(capsys, "--gpus", "0"))
    assert plain["ntasks-per-node"] == "1" and plain["output"] == f"{tmp_path}/out/kto-%j.out"
    assert not {"gpus-per-node", "mem", "partition", "account", "qos", "array"} & set(plain)


def test_arguments_and_variables_are_passed_unchanged(tmp_path: Path) -> None:
    arguments = ["kto", "--dataset_name", "a b's.jsonl", "--deepspeed", '{"a": "$HOME `x`"}']
    setup = "echo 'from setup'; export X=\"1 2\""
    script = slurm_module.Job([], [], {"ALIGNMENT_SETUP": setup, "ALIGNMENT_CONTAINER": ""}, arguments).script()
    (tmp_path / "script").write_text(script.replace('main "$@"', 'printf "%s\\n" "$@"; env'))
    env = {"PATH": "/usr/bin:/bin", "ALIGNMENT_CONTAINER": "apptainer:left_over", "PYTHONPATH": "/own"}
    done = subprocess.run(["bash", tmp_path / "script"], env=env, text=True, capture_output=True, check=True)
    lines = done.stdout.splitlines()
    variables = dict(line.partition("=")[::2] for line in lines[5:])
    assert lines[:5] == arguments and done.stderr == ""
    assert variables["ALIGNMENT_SETUP"] == setup and "ALIGNMENT_CONTAINER" not in variables
    assert variables["PYTHONPATH"] == f"{ROOT}:/own"


def test_the_output_folder_and_the_checkpoint_of_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are passed last, as the script does not parse recipes like Python. Without a checkpoint, it decides."""
    text = "{method: kto, dataset_name: rows.jsonl, output_dir: ~/a, model_name_or_path: m}\n"
    (tmp_path / "own.yaml").write_text(text)
    (tmp_path / "old.yaml").write_text(text.replace("~/a", "b, resume_from_checkpoint: c"))
    for arguments, expected in {
        "own.yaml --resume_from_checkpoint --beta 0.2": "--output_dir HOME/a",
        "own.yaml --output_dir=~/b": "--output_dir HOME/b",
        "own.yaml --output_dir b --resume_from_checkpoint=c": "--resume_from_checkpoint c --output_dir b",
        "old.yaml --resume_from_checkpoint False": "--resume_from_checkpoint false --output_dir b",
        "old.yaml": "--resume_from_checkpoint c --output_dir b",
    }.items():
        code, out, err = run(capsys, *arguments.split(), "--print")
        assert (code, err) == (0, "")
        assert f"\nset -- {shlex.join(arguments.split())} {expected.replace('HOME', str(Path.home()))}\n" in out


def test_a_third_party_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    method = (ROOT / "examples" / "orpo.py").read_text() + "\nimport os\nos.environ['SET_BY_A_LIBRARY'] = '1'\n"
    (tmp_path / "own.py").write_text(method)
    given = shlex.split("--method own.py:ORPOTrainer --model_name_or_path m --dataset_name a.jsonl --output_dir out")
    code, out, _ = run(capsys, *given, "--beta", "0.3", "--print")
    assert code == 0 and " --beta 0.3 --output_dir out\n" in out
    code, _, err = run(capsys, *given, "--beta", "high", "--print")
    assert code == 1 and "beta='high'" in err
    assert "SET_BY_A_LIBRARY" not in submit_command.os.environ, "it would be in that of the job"


def test_options_of_jobs_and_methods_do_not_overlap() -> None:
    own = {action.dest for action in _parser("x")._actions} | {"array"}
    for cls in METHODS.values():
        assert not own & set(option_names(cls))


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ("--nodes 0", "--nodes='0'"),
        ("--signal TERM@60", "--signal='TERM@60'"),
        ("--mounts /data", "--mounts='/data'"),
        ("--job-name a\\b", "'--job-name=a\\\\b'"),
        ("--prepare-sbatch=-H", "--prepare-sbatch=['-H']"),
        ("--prepare --sbatch=--dep=singleton", "--sbatch='--dep=singleton'"),
        ("--seeds 1-2 --seed 4", "--seed=4"),
        ("--seeds 1-2 --use_peft --merged_output_dir m", "merged_output_dir='m'"),
        ("--overwrite_output_dir true", "overwrite_output_dir=True"),
        ("--save_strategy no", "save_strategy='no'"),
        ("--dry_run", "dry_run=True"),
        ("--push_to_hub --hub_token hf_mine", "--hub_token=<hidden>"),
        ("--bata 1", "bata='1'"),
        ("--dataset_name no.csv", "no.csv: file or folder does not exist"),
    ],
)
def test_errors_are_found_before_sbatch_is_called(
    slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, place: str
) -> None:
    code, out, err = run(capsys, *TRAIN, *arguments.split())
    assert (code, out, err.count("\n")) == (1, "", 1) and err.startswith(f"error: {place}"), err
    assert not (slurm / "called").exists() and "hf_mine" not in err


def test_a_step_is_counted_over_all_ranks_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    """KTO rejects one row per step, but not one row per rank on several ranks."""
    least = ("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "1")
    printed(capsys, "--nodes", "2", *least)
    code, _, err = run(capsys, *TRAIN, "--print", *least)
    assert code == 1 and "at least two rows" in err


# What sbatch is asked ------------------------------------------------------------------------------------------------


def test_print_needs_no_slurm_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert printed(capsys).startswith("#!/bin/bash\n#SBATCH --job-name=alignment\n")
    code, out, err = run(capsys, *TRAIN)
    assert (code, out) == (1, "") and err.startswith("error: sbatch: No such file or directory; submit from a login")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_job_is_submitted_and_described(slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """sbatch gets the options as arguments as well, because its variables override the header of a script."""
    code, out, err = run(capsys, *TRAIN, "--nodes", "2", "--gpus", "8", "--", "--constraint", "a b")
    assert (code, err) == (0, "")
    said = "submitted job 40: ", f"status {tmp_path}/out/kto\n", f"tail -F {tmp_path}/out/kto-40.out\n", "scancel 40"
    assert all(each in out for each in (*said, f"touch {tmp_path}/out/kto/STOP")), out
    options = " ".join(
        f"--{name}={value}".rstrip("=") for name, value in header((slurm / "given-0").read_text()).items()
    ).replace("--constraint --a b", "--constraint a b")
    assert (slurm / "called").read_text() == f"--test-only {options}\n--parsable {options}\n"
    assert (tmp_path / "out").is_dir() and list((tmp_path / "out").iterdir()) == []
    _, out, _ = run(capsys, *TRAIN, "--seeds", "1-3")
    assert f"status {tmp_path}/out/kto/seed-N\n" in out and f"tail -F {tmp_path}/out/kto-41_N.out\n" in out


def test_sbatch_judges_first(slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (slurm / "refuses").write_text("test-only.*nodes=4")
    code, out, err = run(capsys, *TRAIN, "--nodes", "4", "--prepare")
    assert (code, out) == (1, "") and err.startswith("error: sbatch --test-only: ")
    assert "--parsable" not in (slurm / "called").read_text() and not (tmp_path / "out").exists()


def test_prepare_comes_first(slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--prepare", "--prepare-partition", "cpu", "--prepare-time", "30", "--gpus", "8", "--nodes", "4"]
    code, out, err = run(capsys, *TRAIN, *more, "--partition", "gpu")
    assert (code, err) == (0, "") and out.startswith("submitted job 41: 4 nodes")
    assert "  after    preparation job 40" in out
    first, second = ((slurm / f"given-{number}").read_text() for number in (0, 1))
    expected = {"nodes": "1", "ntasks-per-node": "1", "partition": "cpu", "time": "30"}
    assert expected.items() <= header(first).items() and not {"gpus-per-node", "signal"} & set(header(first))
    assert header(first)["output"] == f"{tmp_path}/out/kto-prepare-%j.out"
    assert " --ranks 32\n" in first and "--ranks" not in second and "DS_ACCELERATOR" not in first + second
    assert "export ALIGNMENT_COMMAND=prepare\n" in first and "export ALIGNMENT_COMMAND=train\n" in second
    asked = [line.partition(" ")[0] for line in (slurm / "called").read_text().splitlines()]
    assert asked == ["--test-only", "--test-only", "--parsable", "--parsable"]
    assert (slurm / "called").read_text().endswith(" --dependency=afterok:40 --kill-on-invalid-dep=yes\n")
    out = printed(capsys, *more, "--gpus", "0")
    assert out.count("export DS_ACCELERATOR=cpu\n") == 2 and " --ranks 4\n" in out
    assert out.count("#!/bin/bash") == 2 and "--dependency=afterok:PREPARATION_JOB_ID" in out


def test_options_for_gpu_nodes_do_not_apply_to_the_preparation_job(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--prepare", "--account", "lab", "--qos", "gpu", "--mem", "500G", "--sbatch=--constraint=ib"]
    own = ["--prepare-partition", "cpu", "--prepare-sbatch=--qos=cpu --exclusive"]
    first, second = map(header, printed(capsys, *more, *own).split("# The training job"))
    assert {"account": "lab", "qos": "cpu", "exclusive": ""}.items() <= first.items()
    assert not {"constraint", "mem"} & set(first) and "exclusive" not in second
    assert {"account": "lab", "qos": "gpu", "mem": "500G", "constraint": "ib"}.items() <= second.items()


def test_seeds_are_prepared_in_the_folder_of_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Their common parent folder is not the output folder of a run, and could not be prepared a second time."""
    first, second = printed(capsys, "--prepare", "--seeds", "03-5,1%2").split("# The training job")
    assert " --seed 3 --output_dir out/kto/seed-3 --ranks 1\n" in first and "array" not in header(first)
    assert "\nset -- kto --dataset_name rows.jsonl --output_dir out/kto --output_dir out/kto\n" in second


def test_the_training_job_is_rejected(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The preparation job is cancelled."""
    (slurm / "refuses").write_text("afterok")
    code, out, err = run(capsys, *TRAIN, "--prepare")
    assert (code, out) == (1, "") and (slurm / "called").read_text().endswith("scancel 40\n")
    assert err.splitlines()[0] == "cancelling the preparation job: scancel 40"
