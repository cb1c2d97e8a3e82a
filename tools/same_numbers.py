"""Show that a code change did not change any results: ``python tools/same_numbers.py BASE [HEAD] [--quick]``.

Make short seeded runs of every method, ZeRO stage and number of ranks with the code of two commits on this machine,
and compare all logged values and saved weights. Only times and memory may differ, and keys may be renamed as listed in
``tools/renamed_keys.yaml``. A side is a commit, or a folder with a checkout; HEAD defaults to the current state of
this checkout. The exit status is 1 if anything differs.

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

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not tools/, which Python has added for the script

from tools.comparing.comparison import Difference, compare  # noqa: E402
from tools.comparing.matrix import Run, World, runs  # noqa: E402
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


class Side:
    """One version of the code.

    Args:
        name: ``base`` or ``head``.
        root: its checkout.
        folder: folder for its recipes, results and cache.
        server: the server that forks its ranks.
    """

    def __init__(self, name: str, root: Path, folder: Path, server: RankServer) -> None:
        self.name, self.root, self.folder = name, root, folder
        self.server = RankServer(root, server.address)

    def result(self, run: Run) -> Path:
        """Return the output folder of a run."""
        return self.folder / run.name / "out"

    def train(self, run: Run) -> str | None:
        """Make a run; return the error, or None."""
        place = self.folder / run.name
        place.mkdir(parents=True)
        recipe = place / "recipe.json"
        recipe.write_text(json.dumps({**run.options, "output_dir": str(self.result(run))}))
        # Tokenized rows are cached under a hash of their inputs, so each side needs its own cache.
        variables = {"HF_DATASETS_CACHE": str(self.folder / "cache"), "HF_HUB_OFFLINE": "1"}
        script = self.root / "launch" / "train.py"
        try:
            self.server.run(script, recipe, nproc=run.ranks, timeout=_TIMEOUT_S, env=variables, cwd=place)
        except RanksFailed as failed:
            return f"{run.name}: failed at {self.name} ({self.root}):\n{failed}"
        return None


def compare_runs(base: Side, head: Side, matrix: Sequence[Run], renamed: dict[str, str]) -> bool:
    """Make all runs on both sides and report each result; return whether nothing differs."""
    sides = (base, head)

    def one(run: Run) -> tuple[Run, list[str], list[Difference]]:
        failures = [failure for side in sides if (failure := side.train(run)) is not None]
        differences = [] if failures else compare(run.name, base.result(run), head.result(run), renamed)
        for side in sides:
            shutil.rmtree(side.folder / run.name)
        return run, failures, differences

    bad = 0
    with ThreadPoolExecutor(max_workers=2) as pool:
        for run, failures, differences in pool.map(one, matrix):
            bad += bool(failures or differences)
            print(f"{run.name}: {'failed' if failures else f'{len(differences)} differences'}", flush=True)
            for line in [*failures, *differences[:_SHOWN]]:
                print(f"  {line}", flush=True)
    print(f"{len(matrix) - bad} of {len(matrix)} runs are identical")
    return not bad


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command-line arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", metavar="BASE", help="a commit, or a folder with a checkout")
    parser.add_argument(
        "head",
        metavar="HEAD",
        nargs="?",
        default=str(ROOT),
        help="a commit, or a folder with a checkout; default: this checkout",
    )
    parser.add_argument(
        "--quick", action="store_true", help="run each method on two of the ten engines (less than 5 minutes)"
    )
    parser.add_argument("--only", nargs="+", metavar="PART", help="only runs whose names contain one of these parts")
    parser.add_argument(
        "--base-python", metavar="PYTHON", help="Python interpreter with the libraries for BASE; default: this one"
    )
    parser.add_argument(
        "--renamed",
        type=Path,
        default=ROOT / "tools" / "renamed_keys.yaml",
        help="YAML file with renamed keys (old: new)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare both sides; return the exit status."""
    given = parse(argv)
    renamed = yaml.safe_load(given.renamed.read_text(encoding="utf-8")) or {}
    server = RankServer()
    other = server if given.base_python is None else RankServer(python=os.path.abspath(given.base_python))
    with tempfile.TemporaryDirectory(prefix="same-numbers-") as name, contextlib.ExitStack() as stack:
        stack.callback(server.close)
        stack.callback(other.close)
        place = Path(name)
        roots = [
            stack.enter_context(checkout(side, place / f"code-{number}"))
            for number, side in enumerate((given.base, given.head))
        ]
        matrix = runs(World.made(place / "world"), given.quick)
        if given.only:
            matrix = [run for run in matrix if any(part in run.name for part in given.only)]
        if not matrix:
            raise SystemExit(f"no run name contains any of {given.only}")
        folders = place / "base", place / "head"
        base, head = (Side(*side) for side in zip(("base", "head"), roots, folders, (other, server)))
        return 0 if compare_runs(base, head, matrix, renamed) else 1


if __name__ == "__main__":
    sys.exit(main())
