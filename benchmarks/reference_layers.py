"""The cost of ZeRO-3's hooks in a reference with many small layers, with and without layers as leaf modules.

    python benchmarks/reference_layers.py --layers 28

The layers are so narrow that almost all of the time is spent in Python; the sides alternate, and medians are printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch  # noqa: E402

from alignment.config.dtypes import plan_dtypes  # noqa: E402
from alignment.data.batching import collate  # noqa: E402
from alignment.engines.launch_env import init_distributed  # noqa: E402
from alignment.engines.placement import plan_frozen  # noqa: E402
from alignment.methods.kto_options import KTOConfig  # noqa: E402
from alignment.models.source import model_source  # noqa: E402
from alignment.references import engine  # noqa: E402
from alignment.references.base import RowIds  # noqa: E402
from benchmarks.shapes import TINY, write_model  # noqa: E402


def built(model: str, placement: str, leaves: bool) -> Any:
    """Build the reference, with its layers as leaf modules or as DeepSpeed sets them up."""
    args = KTOConfig(output_dir="unused", use_cpu=True, report_to="none", per_device_train_batch_size=2)
    dtypes = plan_dtypes(args, {})
    source = model_source(model, "ref_model_name_or_path", args)
    frozen = plan_frozen(
        args,
        "ref",
        placement=placement,
        deepspeed=None,
        dtypes=dtypes,
        world_size=1,
        hidden_size=TINY.hidden,
        micro_batch=2,
    )
    # "auto" depends on the width, and would keep a layer as narrow as this one unpartitioned.
    zero = frozen.ds_config.get("zero_optimization", {})
    if zero.get("stage") == 3:
        zero["stage3_param_persistence_threshold"] = 0
    with mock.patch.object(engine, "mark_leaves", engine.mark_leaves if leaves else lambda *_: []):
        return engine.ReferencePlan(source, source, frozen, torch.float32).build(args)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28, help="decoder layers (default: 28)")
    parser.add_argument("--repeats", type=int, default=15, help="forward passes per side (default: 15)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    init_distributed(use_cpu=True)
    batch = collate([(range(2, 10), range(10, 18)), (range(3, 9), range(20, 30))], 18)
    ids = RowIds("", (0, 1))
    with tempfile.TemporaryDirectory(prefix="reference-layers-") as folder:
        write_model(Path(folder), replace(TINY, layers=given.layers))
        sides = {
            "replica, no hooks": built(folder, "replica", False),
            **{
                f"{placement}, {name}": built(folder, placement, leaves)
                for placement in ("sharded", "offload")
                for name, leaves in (("DeepSpeed's default", False), ("layers as leaf modules", True))
            },
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        answers = {}
        for _ in range(given.repeats + 2):
            for name, reference in sides.items():
                start = time.perf_counter()
                answers[name] = reference.sequence_logps(batch, ids)
                seconds[name].append(time.perf_counter() - start)
    first, *others = answers.values()
    print(f"\n{given.layers} layers of width {TINY.hidden}; same bits: {all(torch.equal(first, o) for o in others)}\n")
    print("| reference | ms per forward | of which hooks, ms per layer |\n|---|--:|--:|")
    least = statistics.median(seconds["replica, no hooks"][2:])
    for name, times in seconds.items():
        whole = statistics.median(times[2:])
        print(f"| {name} | {1e3 * whole:.1f} | {1e3 * (whole - least) / given.layers:.2f} |")


if __name__ == "__main__":
    main()
