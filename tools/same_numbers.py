"""Show that a code change did not change any results: ``python tools/same_numbers.py BASE [HEAD] [--quick]``.

Make short seeded runs of every method, ZeRO stage and number of ranks with the code of two commits on this machine,
and compare all logged values and saved weights. Only times and memory may differ. A side is a commit, or a folder with
a checkout; HEAD defaults to the current state of this checkout. The exit status is 1 if anything differs.

``python tools/same_numbers.py . --base-python .venv/bin/python`` compares libraries instead: the same code with the
libraries of another Python and of this one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not tools/, which Python has added for the script

from tools.comparing.comparison import compare  # noqa: E402
from tools.comparing.matrix import Run, make_world, runs  # noqa: E402
from tools.ranks import RankServer, RanksFailed  # noqa: E402

_SHOWN = 8  # maximum number of printed differences per run
_TIMEOUT_S = 180.0


@contextlib.contextmanager
def checkout(side: str, folder: Path) -> Iterator[Path]:
    """Provide the code of a commit in a temporary worktree, or of a folder."""
    if (Path(side) / "alignment").is_dir():
        yield Path(side).resolve()
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    done = subprocess.run([*git, "add", "--detach", str(folder), side], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{side}: neither a commit nor a folder with a checkout: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def train(server: RankServer, folder: Path, run: Run) -> Iterator[str]:
    """Make a run with a server's version of the code, in a folder of that version; yield the error if it fails."""
    place = folder / run.name
    place.mkdir(parents=True)
    recipe = place / "recipe.json"
    recipe.write_text(json.dumps({**run.options, "output_dir": str(place / "out")}))
    # Tokenized rows are cached under a hash of their inputs, so each side needs its own cache.
    variables = {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    script = server.root / "launch" / "train.py"
    try:
        server.run(script, recipe, nproc=run.ranks, timeout=_TIMEOUT_S, env=variables, cwd=place)
    except RanksFailed as failed:
        yield f"failed with {server.root}:\n{failed}"


def compare_runs(servers: Sequence[RankServer], place: Path, matrix: Sequence[Run]) -> bool:
    """Make all runs on both sides and report each result; return whether nothing differs."""

    def one(run: Run) -> list[str]:
        sides = [place / f"side-{number}" for number in range(len(servers))]
        found = [line for server, side in zip(servers, sides) for line in train(server, side, run)]
        found = found or compare(*(side / run.name / "out" for side in sides))
        for side in sides:
            shutil.rmtree(side / run.name)
        return found

    bad = 0
    with ThreadPoolExecutor(max_workers=2) as pool:
        for run, found in zip(matrix, pool.map(one, matrix)):
            bad += bool(found)
            lines = [f"{run.name}: {len(found)} differences", *(f"  {run.name}: {line}" for line in found[:_SHOWN])]
            print("\n".join(lines), flush=True)
    print(f"{len(matrix) - bad} of {len(matrix)} runs are identical")
    return not bad


def main(argv: Sequence[str] | None = None) -> int:
    """Compare both sides; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", metavar="BASE", help="a commit, or a folder with a checkout")
    parser.add_argument("head", metavar="HEAD", nargs="?", default=str(ROOT), help="the same; default: this checkout")
    parser.add_argument("--quick", action="store_true", help="run each method on two of the ten engines (5 minutes)")
    parser.add_argument("--only", nargs="+", metavar="PART", help="only runs whose names contain one of these parts")
    parser.add_argument("--base-python", metavar="PYTHON", help="Python with the libraries for BASE; default: this")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="same-numbers-") as name, contextlib.ExitStack() as stack:
        place = Path(name)
        servers: list[RankServer] = []
        for side, python in ((given.base, given.base_python or sys.executable), (given.head, sys.executable)):
            root = stack.enter_context(checkout(side, place / f"code-{len(servers)}"))
            servers.append(RankServer(root, python=os.path.abspath(python)))
            stack.callback(servers[-1].close)
        make_world(place / "world")
        matrix = runs(place / "world", given.quick)
        matrix = [run for run in matrix if not given.only or any(part in run.name for part in given.only)]
        if not matrix:
            raise SystemExit(f"no run name contains any of {given.only}")
        return 0 if compare_runs(servers, place, matrix) else 1


if __name__ == "__main__":
    sys.exit(main())
