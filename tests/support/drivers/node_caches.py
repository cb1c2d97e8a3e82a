"""Two ranks that are each the first of a node: ``node_caches.py FOLDER MODEL``. Each prints one line of JSON.

A node is a cache: rank 1 gets another one than rank 0, or the same.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
from support.helpers import options, train_and_close, unpaired_rows

import alignment
from alignment.config.errors import DataError
from alignment.engines.launch_env import init_distributed
from alignment.run.ranks import rank
from alignment.training import data


def trained(folder: Path, cache: Path, model: str, rows: Callable[[], Any], **more: Any) -> dict[str, Any]:
    """What a run of two steps logs, how often this rank tokenized, and where its rows lie."""
    tokenized: list[str] = []
    prepare = data.prepare

    def counted(*args: Any, **kwargs: Any) -> Path:
        tokenized.append("")
        return prepare(*args, **kwargs)

    with (
        mock.patch.object(datasets.config, "HF_DATASETS_CACHE", cache),
        mock.patch.object(data, "prepare", counted),
    ):
        args = alignment.KTOConfig(**options(folder, max_steps=2, **more))
        try:
            trainer = alignment.KTOTrainer(model, args=args, train_dataset=rows())
        except DataError as error:
            return {"error": str(error), "tokenized": len(tokenized)}
        train_and_close(trainer)
        files = {Path(file["filename"]).parts[-5] for file in trainer.data.train.dataset.cache_files}
        logged = [{key: entry[key] for key in ("loss", "grad_norm")} for entry in trainer.state.log_history[:2]]
    return {"tokenized": len(tokenized), "log": logged, "cache": sorted(files), "left": sorted(os.listdir(cache))}


def main() -> None:
    """Run all cases."""
    os.environ["LOCAL_RANK"] = "0"
    init_distributed(use_cpu=True)
    folder, model = Path(sys.argv[1]), sys.argv[2]
    own = lambda: unpaired_rows(8)  # noqa: E731
    found = {
        "shared": trained(folder / "shared", folder / "both", model, own),
        "apart": trained(folder / "apart", folder / f"node{rank()}", model, own),
        "precomputed": trained(
            folder / "precomputed", folder / f"other{rank()}", model, own, ref_placement="precomputed"
        ),
        "other rows": trained(
            folder / "unlike", folder / f"unlike{rank()}", model, lambda: unpaired_rows(8, seed=rank())
        ),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
