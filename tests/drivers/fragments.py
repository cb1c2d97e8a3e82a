"""Ranks that save and load optimizer fragments: ``fragments.py FOLDER JOBS.json``; rank 0 writes ``results.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from fragment_runs import Case, begin, continued, distance, fp16_on_cpu, proceed

from alignment.engines.collectives import gathered
from alignment.engines.launch_env import init_distributed


def pairs(folder: Path, stages: list[str], sources: list[str]) -> dict[str, float]:
    """Start at each stage on these ranks, and continue at each stage from runs started elsewhere."""
    world = torch.distributed.get_world_size()
    wanted = {stage: begin(Case(f"stage{stage}"), folder / f"{world}-{stage}") for stage in stages}
    begun = [*sources, *(f"{world}-{stage}" for stage in stages)]
    return {
        f"{source} to {world}-{stage}": distance(proceed(Case(f"stage{stage}"), folder / source), update)
        for stage, update in wanted.items()
        for source in begun
        if source != f"{world}-{stage}"
    }


def main() -> None:
    """Run the jobs one after another."""
    folder, jobs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    init_distributed(use_cpu=True)
    world = torch.distributed.get_world_size()
    results: dict[str, Any] = {}
    with fp16_on_cpu():
        for text in jobs["continued"]:
            found = continued(Case.of(text), folder / f"{world}-{text.replace('/', '_')}", 3, 3)
            results[text] = sorted({name for names in gathered(found) for name in names})
    results["pairs"] = pairs(folder, jobs["stages"], jobs["sources"])
    if torch.distributed.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
