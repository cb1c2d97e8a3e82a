"""A pytest plugin that runs every test in a separate process, concurrently, with a time limit and a JSON outcome.

DeepSpeed and torch.distributed have process-wide state, and a script trains one model in one process. The libraries
are imported once, and every test is a fork of that process.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tools.trl import shim
from tools.trl.reasons import Outcome, Reason

_RENAMED = {"AutoModelForVision2Seq": "AutoModelForImageTextToText"}  # imported by the tests of older releases
_MARKS = (
    ("vision", Reason.VISION),
    ("vllm", Reason.VLLM),
    ("liger", Reason.LIGER),
    ("accelerator", Reason.GPU),
    ("flash", Reason.GPU),
    ("kernels", Reason.GPU),
    ("ampere", Reason.GPU),
    (shim.PRIVATE, Reason.PRIVATE),
    ("llm-blender", Reason.PACKAGE),
    ("llm_blender", Reason.PACKAGE),
    ("wandb", Reason.PACKAGE),
)


def pytest_addoption(parser: Any) -> None:
    """Register the plugin's options."""
    parser.addoption("--settings", required=True, help="JSON file: checkouts, limit, jobs, folder, skip")


def pytest_configure(config: Any) -> None:
    """Install the shim before anything is imported from TRL."""
    settings = json.loads(Path(config.getoption("--settings")).read_text())
    config.trl = settings
    shim.install(map(Path, settings["checkouts"]))
    config.addinivalue_line("markers", "slow: TRL's slow tests")
    for name in ("low_priority", "require_torch_accelerator", "is_staging_test"):
        config.addinivalue_line("markers", f"{name}: a marker of TRL")


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule() -> None:
    """Restore names that transformers has removed; its ``testing_utils`` imports it once more."""
    importlib.import_module("transformers.testing_utils")
    transformers = importlib.import_module("transformers")

    for old, new in _RENAMED.items():
        if old not in vars(transformers):
            setattr(transformers, old, getattr(transformers, new))


@pytest.fixture
def lazy_shared_datadir(request: Any) -> Path:
    """Replace pytest-datadir's fixture, for tests that only read."""
    return next(parent / "data" for parent in Path(request.node.fspath).parents if (parent / "data").is_dir())


def identifier(item: Any) -> str:
    """Return ``RELEASE/FILE::TEST``, without the folder of the file, which differs between releases."""
    folder, settings = Path(item.fspath), item.config.trl
    release = folder.relative_to(settings["root"]).parts[0]
    return f"{settings['releases'][release]}/{folder.name}::{item.nodeid.partition('::')[2]}"


def left_out(item: Any) -> Reason | None:
    """Return the reason to skip a test according to its markers."""
    if item.get_closest_marker("slow"):
        return Reason.SLOW
    for mark in item.iter_markers("skipif"):
        reason = _reason(str(mark.kwargs.get("reason", "")))
        if reason in (Reason.VISION, Reason.VLLM, Reason.LIGER, Reason.GPU):
            return reason
    return None


def _reason(text: str) -> Reason | None:
    return next((reason for word, reason in _MARKS if word in text.lower()), None)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Deselect tests that are not requested."""
    only, done = config.trl["only"].split(), set(config.trl["done"])
    names = {id(item): identifier(item) for item in items}
    items[:] = [
        item for item in items if names[id(item)] not in done and all(word in names[id(item)] for word in only)
    ]


def pytest_runtestloop(session: Any) -> bool:
    """Run every test in a fork, with up to ``jobs`` concurrent tests."""
    if session.testsfailed:
        return False
    config = session.config
    config._tmp_path_factory.getbasetemp()  # one folder for all forks
    waiting: Iterator[Any] = iter([] if config.option.collectonly else session.items)
    running: dict[int, tuple[Any, float]] = {}
    more = True
    while running or more:
        while more and len(running) < config.trl["jobs"]:
            item = next(waiting, None)
            if item is None:
                more = False
            elif reason := left_out(item):
                _write(item, Outcome(False, reason, "skipped by its markers"))
            else:
                running[_fork(item)] = item, time.monotonic()
        for pid, (item, start) in list(running.items()):
            _look(pid, item, start, running)
        time.sleep(0.02)
    return True


def _look(pid: int, item: Any, start: float, running: dict[int, tuple[Any, float]]) -> None:
    """Read the outcome of a process that has exited, or kill one that exceeds its time limit."""
    seconds = time.monotonic() - start
    if os.waitpid(pid, os.WNOHANG) != (0, 0):
        result = _folder(item) / f"{pid}.json"
        if result.exists():
            _write(item, Outcome(**_revived(json.loads(result.read_text())), seconds=round(seconds, 1)))
        else:
            _write(item, Outcome(False, None, "the process exited without an outcome", round(seconds, 1)))
    elif seconds > item.config.trl["limit"]:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        _write(item, Outcome(False, None, f"timed out after {item.config.trl['limit']} s", round(seconds, 1)))
    else:
        return
    del running[pid]


def _revived(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "reason": Reason[values["reason"]] if values["reason"] else None}


def _folder(item: Any) -> Path:
    return Path(item.config.trl["folder"])


def _write(item: Any, outcome: Outcome) -> None:
    reason = outcome.reason.name if outcome.reason else None
    line = {"test": identifier(item), **vars(outcome), "reason": reason}
    with (_folder(item) / "outcomes.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    state = "passed" if outcome.passed else reason or outcome.detail
    print(f"{line['test']}: {state} ({outcome.seconds} s)", file=sys.__stdout__, flush=True)


def _fork(item: Any) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _run(item)
    finally:
        os._exit(0)


def _run(item: Any) -> None:
    """Run the test in the fork, with separate caches and a separate log, and write its outcome."""
    import datasets

    folder, pid = _folder(item), os.getpid()
    log = os.open(folder / f"{pid}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    cache = folder / f"{pid}.cache"
    shutil.copytree(datasets.config.HF_DATASETS_CACHE, cache)
    datasets.config.HF_DATASETS_CACHE = cache
    os.environ["HF_DATASETS_CACHE"] = str(cache)
    os.chdir(_own_folder(folder, pid))
    reports = runtestprotocol(item, log=False, nextitem=None)
    outcome = _outcome(reports)
    values = {"passed": outcome.passed, "reason": outcome.reason and outcome.reason.name, "detail": outcome.detail}
    if not outcome.passed and outcome.reason is None:
        text = "\n".join(report.longreprtext for report in reports if report.failed)
        name = "".join(c if c.isalnum() or c in "._-" else "_" for c in identifier(item))
        (folder / "failures").mkdir(exist_ok=True)
        (folder / "failures" / f"{name}.txt").write_text(text + "\n\n" + (folder / f"{pid}.log").read_text()[-20000:])
    shutil.rmtree(cache, ignore_errors=True)
    partial = folder / f"{pid}.part"
    partial.write_text(json.dumps(values))
    partial.rename(folder / f"{pid}.json")


def _own_folder(folder: Path, pid: int) -> Path:
    """Return the working directory of the test, in which a run without ``output_dir`` creates its folder."""
    own = folder / f"{pid}.cwd"
    own.mkdir()
    return own


def _outcome(reports: list[Any]) -> Outcome:
    """Combine the outcomes of setup, call and teardown."""
    for report in reports:
        if report.skipped:
            text = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
            return Outcome(False, _reason(text) or Reason.SKIPPED, text.removeprefix("Skipped: "))
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash else str(report.longrepr)
            return Outcome(False, None, " ".join(text.split())[:400])
    return Outcome(True)
