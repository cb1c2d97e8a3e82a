"""``python -m tools.trl.scripts CHECKOUT...``: run TRL's example scripts of these checkouts with this package.

Only the import lines of a script are changed. The commands are those of its docstring, for two steps, with small
random models of the same families and rows with the same columns as its dataset, in one process each and without a
network. Print a Markdown table, and exit with status 1 if a script failed with anything but a refusal.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.ranks.client import ROOT
from tools.trial import workspace


def main(argv: Sequence[str] | None = None) -> int:
    """Run the commands and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.trl.scripts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkouts", nargs="+", type=Path, help="folders of TRL's repository, one for each release")
    parser.add_argument(
        "--only", default="", help="only commands whose names contain these words, for example --only 'v0.24 kto LoRA'"
    )
    parser.add_argument("--jobs", type=int, default=2, help="number of concurrent scripts")
    parser.add_argument("--limit", type=int, default=300, help="time limit of a script in seconds")
    parser.add_argument("--hub", type=Path, default=ROOT / "outputs" / "trl-hub", help="folder for the local Hub")
    parser.add_argument(
        "--logs", type=Path, default=ROOT / "outputs" / "trl-scripts", help="folder for the output of every script"
    )
    parser.add_argument("--page", type=Path, help="file to which the page with the table is written")
    given = parser.parse_args(argv)
    _prepare_environment(given.hub)
    from tools.trl.scripts import page, runs

    chosen = runs.chosen(given.checkouts, given.only.split())
    with workspace("trl-scripts-") as folder:
        results = runs.run(chosen, folder, given.logs, given.jobs, given.limit)
    table = page.table(results)
    print("\n".join(table))
    if given.page is not None:
        given.page.write_text(page.text(results, table))
    return int(any(result.failed for result in results))


def _prepare_environment(hub: Path) -> None:
    """Set the environment before libraries read it: the local Hub, no network, one thread."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "HF_TOKEN"):
        os.environ.pop(name, None)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    home = str(hub / "trl-scripts")
    os.environ |= {"HF_HOME": home, "HF_DATASETS_CACHE": f"{home}/datasets"}
    from tools.trl.scripts.assets import prepare

    prepare(hub)


if __name__ == "__main__":
    sys.exit(main())
