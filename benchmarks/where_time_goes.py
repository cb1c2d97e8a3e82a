"""Profile our step on the shape of the comparison with TRL: parts of a step, and kinds of operations.

    python benchmarks/where_time_goes.py --method cpo --threads 1

torch's profiler adds a few percent; use the shares. Parts are nested: an indented line is part of the
one above it.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

from alignment.data import batching  # noqa: E402
from alignment.engines.scoring import PolicyEngine, ScoringEngine  # noqa: E402
from alignment.models import logprobs  # noqa: E402
from alignment.training.loop import TrainingLoop  # noqa: E402
from benchmarks import ours  # noqa: E402
from benchmarks.jobs import METHODS, Job  # noqa: E402
from benchmarks.shapes import SHAPES, Shape, write_model, write_reward_model  # noqa: E402

WARM_UP = 3
# Class or module, function, and the label of its line.
PARTS: list[tuple[Any, str, str]] = [
    (TrainingLoop, "_step", "step"),
    (ScoringEngine, "forward", "  forward passes (reference, KL and training)"),
    (logprobs, "token_logprobs", "    head: tiles of log-probs and their gradient"),
    (PolicyEngine, "backward", "  backward (recomputes the layers)"),
    (logprobs, "_head_gradients", "    head: gradient of its weight"),
    (PolicyEngine, "step", "  optimizer"),
    (batching.MicroBatches, "__getitem__", "collation (outside the step)"),
]
OPERATIONS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("scaled_dot_product", "flash"),
}


def shown_as(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function so that its calls are named in the profile."""

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(label):
            return function(*args, **kwargs)

    return named


def profiled(method: str, steps: int, shape: Shape) -> Any:
    """Return the profiler's averages over ``steps`` steps."""
    with tempfile.TemporaryDirectory(prefix="where-time-goes-") as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
        write_model(Path(folder) / "model", shape)
        rows = METHODS[method].rows(shape, (WARM_UP + steps) * METHODS[method].batch, 0)
        job = Job("ours", method, f"{folder}/model", "", f"{folder}/output", WARM_UP + steps, WARM_UP)
        if method == "online_dpo":
            write_reward_model(Path(folder) / "reward", shape)
            job = replace(job, reward_model=f"{folder}/reward")
        trainer = ours.build(job, Dataset.from_list(rows))
        for owner, name, label in PARTS:
            setattr(owner, name, shown_as(label, getattr(owner, name)))
        recorder = profile(activities=[ProfilerActivity.CPU])
        whole, done = TrainingLoop._step, 0

        def counted(loop: TrainingLoop, *window: Any) -> None:
            nonlocal done
            if done == WARM_UP:
                recorder.start()
            whole(loop, *window)
            done += 1

        TrainingLoop._step = counted  # type: ignore[method-assign]
        trainer.train()
        recorder.stop()
        trainer.close()
    return recorder.key_averages()


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=list(METHODS), default="cpo")
    parser.add_argument("--steps", type=int, default=10, help="profiled steps, after 3 warm-up steps (default: 10)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--shape", choices=list(SHAPES), default="head", help="what takes most of the time")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found = profiled(given.method, given.steps, SHAPES[given.shape])
    total = {event.key: event.cpu_time_total / 1e3 / given.steps for event in found}
    whole = total["step"]
    print(f"\n{given.method}, threads: {given.threads}, {SHAPES[given.shape].describe()}\n")
    print("| part | ms | share |\n|---|---|---|")
    for _, _, label in PARTS:
        if label in total:
            indented = label.replace("  ", "&emsp;")
            print(f"| {indented} | {total[label]:.1f} | {100 * total[label] / whole:.1f}% |")
    print("\n| operations | share of the step |\n|---|---|")
    for name, keys in OPERATIONS.items():
        own = sum(e.self_cpu_time_total for e in found if any(key in e.key for key in keys)) / 1e3 / given.steps
        print(f"| {name} | {100 * own / whole:.1f}% |")


if __name__ == "__main__":
    main()
