"""Measure CPU seconds (user and system, all threads) until a process responds, and until its first optimizer step.

    python benchmarks/start_up.py --repeats 7
    python benchmarks/start_up.py --repeats 7 --base PATH    # another checkout; the two alternate

Prints medians. CPU time is used because wall time depends on what else the machine does; on busy cores both grow, so
use the ratio, and run it on a mostly idle machine. Linux only. The first run of each is not counted: it compiles
bytecode.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.processes import Failed, free_port, plain_environment  # noqa: E402

# The line of log.jsonl that a run without progress bars prints at its first step.
_FIRST_STEP = '"step": 1,'
_TICKS = os.sysconf("SC_CLK_TCK")
Measure = Callable[[Path, Path], float]


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a running process from Linux's ``/proc``, in whole ticks of 0.01 s."""
    after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / _TICKS


def start(checkout: Path, arguments: Sequence[str], output: IO[str] | int, **more: str) -> subprocess.Popen[str]:
    """Start ``launch/train.py`` of a checkout on the CPU, with both output streams sent to ``output``."""
    own = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(
        [sys.executable, str(checkout / "launch" / "train.py"), *arguments],
        cwd=checkout,
        env=plain_environment() | own | more,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )


def until_end(checkout: Path, arguments: Sequence[str], ranks: int, code: int) -> float:
    """Return the CPU seconds of all ranks of a command until it exits."""
    port, seconds = str(free_port()), 0.0
    with tempfile.TemporaryFile("w+") as said:
        group = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        group |= {"MASTER_PORT": port}
        started = [
            start(checkout, arguments, said.fileno(), **group, RANK=str(rank), LOCAL_RANK=str(rank))
            if ranks > 1
            else start(checkout, arguments, said.fileno())
            for rank in range(ranks)
        ]
        for process in started:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            seconds += usage.ru_utime + usage.ru_stime
        if any(process.returncode != code for process in started):
            said.seek(0)
            raise Failed(
                f"exit statuses {[process.returncode for process in started]}, expected {code}", said.read()[-4000:]
            )
    return seconds


def until_first_step(checkout: Path, place: Path) -> float:
    """Return the CPU seconds of one rank of a tiny KTO run until it logs its first step; it is then killed."""
    arguments = [
        *(
            "--method",
            "kto",
            "--model_name_or_path",
            str(place / "model"),
            "--dataset_name",
            str(place / "rows.jsonl"),
        ),
        *("--output_dir", str(place / "out"), "--overwrite_output_dir", "--max_length", "64", "--max_steps", "2"),
        *("--max_prompt_length", "None", "--logging_steps", "1", "--save_strategy", "no", "--disable_tqdm"),
    ]
    process = start(checkout, arguments, subprocess.PIPE, HF_DATASETS_CACHE=str(place / "cache"))
    assert process.stdout is not None
    said: list[str] = []
    with process, process.stdout:
        for line in process.stdout:
            if _FIRST_STEP in line:
                seconds = cpu_seconds(process.pid)
                process.kill()
                return seconds
            said.append(line)
    raise Failed(f"no first step, exit status {process.returncode}", "".join(said)[-4000:])


WRONG = ["--method", "kto", "--learning_rat", "1"]
MEASURES: dict[str, Measure] = {
    "`--help`": lambda checkout, _: until_end(checkout, ["--method", "kto", "--help"], ranks=1, code=0),
    "an option error": lambda checkout, _: until_end(checkout, WRONG, ranks=1, code=1),
    "an option error, two ranks": lambda checkout, _: until_end(checkout, WRONG, ranks=2, code=1),
    "the first step of KTO": until_first_step,
}


def prepare(place: Path) -> None:
    """Write a tiny model and rows for it."""
    from benchmarks.shapes import TINY, unpaired_rows, write_model

    shape = replace(TINY, family="llama")
    write_model(place / "model", shape)
    rows = unpaired_rows(shape, 24)
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def table(seconds: dict[str, list[list[float]]], with_base: bool) -> str:
    """Return medians as Markdown; ``seconds`` are those of this checkout, preceded by those of the base if any."""
    head = ["CPU seconds until", *(["base"] if with_base else []), "here", *(["here / base"] if with_base else [])]
    lines = [head, ["---", *["--:"] * (len(head) - 1)]]
    for name, of_checkouts in seconds.items():
        medians = [statistics.median(values) for values in of_checkouts]
        ratio = [f"{medians[-1] / medians[0]:.2f}"] if with_base else []
        lines.append([name, *(f"{median:.2f}" for median in medians), *ratio])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--base", type=Path, help="another checkout, measured alternately with this one")
    given = parser.parse_args()
    checkouts = [*([given.base.resolve()] if given.base else []), ROOT]
    seconds: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="start-up-") as folder:
        place = Path(folder)
        prepare(place)
        for name, measure in MEASURES.items():
            rounds = [[measure(checkout, place) for checkout in checkouts] for _ in range(given.repeats + 1)][1:]
            seconds[name] = [list(values) for values in zip(*rounds)]
    print(f"medians of {given.repeats} runs\n\n{table(seconds, given.base is not None)}")


if __name__ == "__main__":
    main()
