"""``python -m tools.trl CHECKOUT...``: run TRL's own tests of these checkouts against this package.

Print a table of releases and files, and exit with status 1 if ``expected.txt`` is wrong about a test that ran. An
interrupted run continues with the next call: outcomes with the current code are stored in ``outputs/``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.ranks.client import ROOT
from tools.trial import workspace
from tools.trl import checkouts, reasons
from tools.trl.hub.build import prepare


def main(argv: Sequence[str] | None = None) -> int:
    """Run the remaining tests and return the exit status."""
    given = _parser().parse_args(argv)
    if not _installed("parameterized"):
        print(
            "tests of TRL up to 0.24 require the package `parameterized`; run pip install parameterized",
            file=sys.stderr,
        )
        return 2
    code = fingerprint(given.checkouts)
    done = {} if given.fresh else _read(given.record, code)
    if given.failed:
        done = {name: outcome for name, outcome in done.items() if outcome.passed or outcome.reason}
    status = run(given, code, done)
    outcomes = _read(given.record, code)
    chosen = {name: outcomes[name] for name in reasons.names(outcomes, given.only)}
    entries = reasons.read(given.expected.read_text()) if given.expected.exists() else {}
    if given.update:
        entries = reasons.updated(chosen, entries)
        given.expected.write_text(reasons.write(entries))
    print("\n".join((*reasons.table(chosen, entries), "", *reasons.by_reason(chosen, entries))))
    wrong = reasons.problems(chosen, entries)
    print("\n".join(("", *wrong)))
    return int(bool(wrong)) or status


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.trl", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkouts", nargs="+", type=Path, help="folders of TRL's repository, one for each release")
    parser.add_argument(
        "--only",
        default="",
        help="only tests whose names contain these words, for example --only '0.24 test_kto lora'",
    )
    parser.add_argument("--jobs", type=int, default=2, help="number of concurrent tests")
    parser.add_argument("--limit", type=int, default=120, help="time limit of a test in seconds")
    parser.add_argument("--update", action="store_true", help="add and remove lines of the file, keeping reasons")
    parser.add_argument("--failed", action="store_true", help="run tests again that failed with the current code")
    parser.add_argument("--fresh", action="store_true", help="run all tests again")
    parser.add_argument("--expected", type=Path, default=reasons.EXPECTED, help="file with the tests that do not pass")
    parser.add_argument("--record", type=Path, default=ROOT / "outputs" / "trl.jsonl", help="outcomes so far")
    parser.add_argument("--failures", type=Path, default=ROOT / "outputs" / "trl-failures", help="tracebacks and logs")
    parser.add_argument("--hub", type=Path, default=ROOT / "outputs" / "trl-hub", help="folder for the local Hub")
    return parser


def fingerprint(folders: Sequence[Path]) -> str:
    """Return a hash of the code that a test runs: this package, this tool, and the checkouts' tests."""
    digest = hashlib.sha256()
    own = [file for name in ("alignment", "tools/trl") for file in (ROOT / name).rglob("*.py")]
    for file in (*sorted(own), *(file for folder in folders for file in checkouts.files(folder))):
        digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _read(record: Path, code: str) -> dict[str, reasons.Outcome]:
    """Read the last outcome of each test with the current code."""
    outcomes = {}
    for line in record.read_text().splitlines() if record.exists() else ():
        if not line.endswith("}"):  # incomplete line
            continue
        entry = json.loads(line)
        if entry.pop("code", None) == code:
            reason = entry.pop("reason")
            name = entry.pop("test")
            outcomes[name] = reasons.Outcome(**entry, reason=reasons.Reason[reason] if reason else None)
    return outcomes


def run(given: argparse.Namespace, code: str, done: dict[str, reasons.Outcome]) -> int:
    """Run the remaining tests and add the outcomes to the record; return pytest's status if it could not run."""
    with workspace("trl-") as folder:
        results = folder / "results"
        results.mkdir()
        copies, releases = [], {}
        for number, checkout in enumerate(given.checkouts):
            releases[f"release{number}"] = checkouts.release(checkout)
            copies += checkouts.copy(checkout, folder / "copies" / f"release{number}")
        settings = {
            "checkouts": [str(path.resolve()) for path in given.checkouts],
            "root": str(folder / "copies"),
            "releases": releases,
            "limit": given.limit,
            "jobs": given.jobs,
            "folder": str(results),
            "only": given.only,
            "done": list(done),
        }
        (folder / "settings.json").write_text(json.dumps(settings))
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "tools.trl.plugin", "-p", "no:cacheprovider"]
        command += [
            "-p",
            "no:xdist",
            "-c",
            os.devnull,
            f"--rootdir={folder / 'copies'}",
            f"--basetemp={folder / 'tmp'}",
        ]
        command += [f"--settings={folder / 'settings.json'}", *map(str, copies)]
        try:
            status = subprocess.run(command, cwd=folder, env=_environment(prepare(given.hub))).returncode
        except KeyboardInterrupt:
            print("interrupted; run the same command to continue")
            status = 1
        _keep(results, given, code)
    return 0 if status in (0, 5) else status  # 5: no tests were left to run


def _environment(home: Path) -> dict[str, str]:
    """Return the environment of the tests: no network, no trackers, one thread each."""
    own = {
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(home / "datasets"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "HF_TOKEN"):
        os.environ.pop(name, None)
    return {"DS_ACCELERATOR": "cpu", **os.environ, **own}


def _keep(results: Path, given: argparse.Namespace, code: str) -> None:
    """Add the outcomes to the record, and copy the logs of failed tests."""
    file = results / "outcomes.jsonl"
    given.record.parent.mkdir(parents=True, exist_ok=True)
    text = given.record.read_text() if given.record.exists() else ""
    with given.record.open("a") as record:
        record.write("\n" * bool(text and not text.endswith("\n")))
        for line in file.read_text().splitlines() if file.exists() else ():
            record.write(json.dumps({"code": code, **json.loads(line)}) + "\n")
    given.failures.mkdir(parents=True, exist_ok=True)
    for failure in (results / "failures").glob("*.txt") if (results / "failures").exists() else ():
        (given.failures / failure.name).write_bytes(failure.read_bytes())


if __name__ == "__main__":
    sys.exit(main())
