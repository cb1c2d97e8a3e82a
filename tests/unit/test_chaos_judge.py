"""The judge of killed runs detects problems; plans are reproducible, and a record continues."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from tools.chaos.events import kind
from tools.chaos.judge import Lineage, Look, compare, look, lost
from tools.chaos.plan import POINTS, drawn
from tools.chaos.record import Record
from tools.chaos.run import Attempted


def checkpoint(output_dir: Path, step: int, best: int) -> Path:
    """A complete checkpoint with two files."""
    folder = output_dir / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file({"weight": torch.full((4,), float(step))}, folder / "model.safetensors")
    (folder / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": f"/old/place/checkpoint-{best}"}))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    records = {
        name: {"size": len(one), "checksum": xxhash.xxh3_128_hexdigest(one)} for name, one in sorted(files.items())
    }
    (folder / "manifest.json").write_text(json.dumps({"step": step, "files": records}))
    return folder


def finished(output_dir: Path, *, resumed: tuple[int, ...] = (), steps: int = 4) -> Path:
    """A finished run that logged every step and was resumed after some of them."""
    checkpoint(output_dir, steps, steps)
    save_file({"weight": torch.ones(4)}, output_dir / "model.safetensors")
    records: list[dict[str, Any]] = [{"event": "start", "run": str(output_dir), "method": "kto"}]
    for step in range(1, steps + 1):
        records.append({"loss": 1 / step, "step": step, "eval_runtime": hash(output_dir)})
        if step in resumed:
            records.append({"event": "resume", "step": step, "attempt": resumed.index(step) + 2})
    (output_dir / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (output_dir / "completions.jsonl").write_text('{"step": 1}\n')
    state = {"best_model_checkpoint": str(output_dir / "checkpoint-4"), "log_history": [{"loss": 1.0}], "epoch": 1.0}
    (output_dir / "trainer_state.json").write_text(json.dumps(state))
    return output_dir


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


HARM = {
    "a cut file": (lambda folder: cut(folder / "model.safetensors"), "bytes"),
    "a flipped bit": (lambda folder: flip(folder / "model.safetensors"), "does not match the manifest"),
    "a missing file": (lambda folder: (folder / "model.safetensors").unlink(), "missing"),
    "a file too many": (lambda folder: (folder / "more.json").write_text("{}"), "not in the manifest"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "the manifest is missing"),
    "another step": (lambda folder: folder.rename(folder.with_name("checkpoint-5")), "of step 4"),
    "no best": (lambda folder: shutil.rmtree(folder.with_name("checkpoint-2")), "best checkpoint"),
    "a truncated line": (lambda folder: (folder.parent / "log.jsonl").write_text('{"a"\n{}\n'), "line 1: truncated"),
    "half a JSON": (lambda folder: (folder.parent / "options.json").write_text('{"a"'), "half-written"),
    "half a model": (lambda folder: (folder.parent / "model.safetensors").write_bytes(b"12345678"), "half-written"),
    "moved aside": (lambda folder: (folder.parent / "previous-1").mkdir(), "moved aside"),
}


@pytest.mark.parametrize("harm", HARM)
def test_damage_is_detected(tmp_path: Path, harm: str) -> None:
    for step in (2, 4):
        checkpoint(tmp_path, step, 2)
    (tmp_path / ".checkpoint-6.partial").mkdir()
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"st')  # a kill truncates the last line
    assert look(tmp_path) == Look((2, 4))
    act, said = HARM[harm]
    act(tmp_path / "checkpoint-4")
    assert any(said in problem for problem in look(tmp_path).problems), look(tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        ((2, 4), (2, 4), 0),
        ((2, 4), (4, 6), 0),
        ((2, 4), (2, 4, 6), 0),
        ((2, 4), (4,), 1),
        ((2, 4), (6,), 2),
        ((2, 4), (2,), 1),
        ((2, 4, 6), (2, 6), 0),
        ((2, 4, 6), (2, 4), 1),
        ((), (2,), 0),
    ],
)
def test_deleted_checkpoints(before: tuple[int, ...], after: tuple[int, ...], count: int) -> None:
    assert len(lost(Look(before), Look(after), 2)) == count


ENDS = {
    "other weights": (lambda folder: flip(folder / "model.safetensors"), "the content differs"),
    "a step twice": (lambda folder: repeat(folder / "log.jsonl"), "step 3 after step 4"),
    "a step missing": (lambda folder: leave_out(folder / "log.jsonl"), "records, 5 expected"),
    "another number": (lambda folder: replace(folder / "log.jsonl", "0.5", "0.6"), "number 3 is"),
    "no resume": (lambda folder: leave_out(folder / "log.jsonl", "resume"), "expected [2]"),
    "another attempt": (lambda folder: replace(folder / "log.jsonl", '"attempt": 2', '"attempt": 1'), "numbered [1]"),
    "other completions": (lambda folder: (folder / "completions.jsonl").write_text(""), "0 lines, 1 expected"),
    "another state": (
        lambda folder: replace(folder / "trainer_state.json", '"epoch": 1.0', '"epoch": 2.0'),
        "epoch is 2.0",
    ),
    "a lock": (lambda folder: (folder / ".lock").write_text(""), ".lock: left behind"),
    "a folder too many": (lambda folder: (folder / "checkpoint-2").mkdir(), "not expected"),
}


def repeat(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[-2]]))


def leave_out(path: Path, what: str = '"step": 3') -> None:
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if what not in line))


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("difference", ENDS)
def test_a_difference_in_the_result_is_detected(tmp_path: Path, difference: str) -> None:
    reference, run = finished(tmp_path / "reference"), finished(tmp_path / "run", resumed=(2,))
    assert compare(run, reference, [2]) == []
    act, said = ENDS[difference]
    act(run)
    assert any(said in problem for problem in compare(run, reference, [2])), compare(run, reference, [2])


def test_resumes_without_a_checkpoint_are_not_in_the_log() -> None:
    lineage = Lineage()
    assert lineage.attempt(Look(), Look((2, 4))) == ()
    assert lineage.attempt(Look((2, 4)), Look((2, 4))) == (4,)
    assert lineage.attempt(Look((2, 4)), Look((4, 6))) == (4,)
    assert lineage.attempt(Look((4, 6)), Look((4, 6))) == (4, 6)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("checkpoint-4", "checkpoint"),
        (".checkpoint-4.partial", "partial"),
        (".checkpoint-4.removed", "removed"),
        (".checkpoint-4.partial/.partial/model.safetensors", "new/model.safetensors"),
        (".checkpoint-4.removed/model.safetensors", "old/model.safetensors"),
        (".checkpoint-4.partial/optimizer-00001-of-00002.safetensors", "new/optimizer.safetensors"),
        (".checkpoint-4.partial/run_state-00001.json", "new/run_state.json"),
        ("log.jsonl", "log.jsonl"),
        ("../elsewhere", None),
    ],
)
def test_paths_have_names_without_numbers(path: str, expected: str | None) -> None:
    assert kind(f"/out/{path}", "/out") == expected


def test_plans_are_reproducible_and_reach_every_point() -> None:
    chains = [drawn(5, number) for number in range(200)]
    assert chains == [drawn(5, number) for number in range(200)] != [drawn(6, number) for number in range(200)]
    kills = [kill for chain in chains for kill in chain.kills]
    assert {kill.point for kill in kills} == {None, *POINTS}
    assert {kill.ranks for kill in kills if kill.point is None} == {(0,), (1,), (0, 1)}
    assert not any(POINTS[chain.kills[0].point].resumed for chain in chains if chain.kills[0].point)


def test_a_record_continues_without_unfinished_chains(tmp_path: Path) -> None:
    def attempted(chain: str, problems: tuple[str, ...] = ()) -> Attempted:
        return Attempted(chain, "kto", 1, "rank 0 …", "random", "save", True, 0, 1.5, problems)

    file = tmp_path / "outputs" / "chaos.jsonl"
    record = Record(file, 3)
    record.add(attempted("0"))
    record.close("0", [attempted("0")])
    record.add(attempted("1", ("gone",)))
    with file.open("a") as out:
        out.write('{"seed": 3, "closed": "1"')
    again, other = Record(file, 3), Record(file, 4)
    assert again.closed == {"0"} and again.kills == 1 and not again.failures and other.kills == 0
    again.add(attempted("1", ("gone",)))
    again.close("1", [attempted("1", ("gone",))])
    assert Record(file, 3).kills == 2
    summary = "\n".join(Record(file, 3).summary())
    assert "2 kills (2 of kto) in 2 runs" in summary and "--seed 3 --replay 1" in summary and "gone" in summary
