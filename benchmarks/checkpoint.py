"""The cost of saving and loading optimizer state on the CPU: seconds, bytes per parameter, peak host memory.

    python benchmarks/checkpoint.py --megabytes 500 --stage 2 --dtype bf16

The state consists of the fragments' fp32 master weights and AdamW's two moments, 12 bytes per parameter. One
process trains a step and saves; another one builds a new engine and loads. The memory of a load is the master
weights that the engine had before plus the peak anonymous memory (RssAnon) added by the load, moments included,
in units of the state. Exits with status 1 if it exceeds 1.10.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from torch.optim import AdamW  # noqa: E402
from torch.optim.lr_scheduler import LambdaLR  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402

from alignment.checkpoint.manifest import record_of  # noqa: E402
from alignment.checkpoint.optimizer_state import read_fragments, write_fragments  # noqa: E402
from alignment.data.batching import collate  # noqa: E402
from alignment.engines.launch_env import init_distributed  # noqa: E402
from alignment.engines.scoring import PolicyEngine  # noqa: E402
from alignment.internals.deepspeed_state import state_units  # noqa: E402
from alignment.models.tasks import CAUSAL_LM  # noqa: E402
from benchmarks.processes import run_module  # noqa: E402

MOST = 1.10
_STATE_BYTES = 12  # bytes per parameter: master weight and two moments
_WIDTH, _VOCABULARY = 512, 1024


class PeakMemory:
    """Samples the process's anonymous memory every millisecond in a thread.

    Attributes:
        before: bytes at the start.
        peak: maximum bytes.
    """

    def __enter__(self) -> PeakMemory:
        self.before = self.peak = anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.peak = max(self.peak, anonymous_bytes())

    def _sample(self) -> None:
        while not self._ended.wait(0.001):
            self.peak = max(self.peak, anonymous_bytes())


def anonymous_bytes() -> int:
    """Return RssAnon of this process: resident memory that is not backed by files."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


def build(job: dict[str, Any]) -> PolicyEngine:
    """Build an engine whose state has the requested size."""
    init_distributed(use_cpu=True)
    parameters = job["megabytes"] * 10**6 / _STATE_BYTES
    of_layer = 2 * _WIDTH**2 + 2 * _WIDTH * (_WIDTH // 8) + 3 * _WIDTH * 4 * _WIDTH
    shape = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=_WIDTH,
        intermediate_size=4 * _WIDTH,
        num_hidden_layers=max(int(parameters / of_layer) + 1, 1),
        num_attention_heads=8,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[job["dtype"]]
    scorer = CAUSAL_LM.scorer(AutoModelForCausalLM.from_config(shape, dtype=dtype), False)
    optimizer = AdamW(scorer.parameters(), lr=1e-4, fused=True)
    config = {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": job["dtype"] == "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": job["stage"]},
        "steps_per_print": 10**9,
    }
    return PolicyEngine(scorer, config, optimizer, LambdaLR(optimizer, lambda step: 1.0))


def save(job: dict[str, Any]) -> dict[str, float]:
    """Train a step, write the fragments, and read them back for their checksum."""
    policy = build(job)
    scores = policy.forward(collate([([2, 3, 4], [5, 6])], 20)).scores
    policy.backward(-scores.sum(), last=True)
    policy.step()
    start = time.perf_counter()
    with PeakMemory() as memory:
        ((name, record),) = write_fragments(policy, Path(job["folder"])).items()
    path = Path(job["folder"]) / name
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    if record_of(path) != record:
        raise RuntimeError(f"{path}: the data read differs from the data written")
    checked = time.perf_counter() - start
    parameters = sum(piece.numel for unit in state_units(policy.engine) for piece in unit.pieces)
    added = memory.peak - memory.before
    return {"seconds": seconds, "checked": checked, "size": record.size, "parameters": parameters, "added": added}


def load(job: dict[str, Any]) -> dict[str, float]:
    """Build the engine and read the fragments."""
    policy = build(job)
    masters = sum(unit.master.nbytes for unit in state_units(policy.engine))
    start = time.perf_counter()
    with PeakMemory() as memory:
        read_fragments(policy, Path(job["folder"]))
    return {"seconds": time.perf_counter() - start, "masters": masters, "added": memory.peak - memory.before}


def measure(job: dict[str, Any]) -> float:
    """Print the cost of a save and a load; return the load's peak memory in units of the state."""
    with tempfile.TemporaryDirectory(dir=job["folder"]) as place:
        job["folder"] = place
        saved, loaded = (
            run_module("benchmarks.checkpoint", Path(place) / part, {**job, "part": part}, {})
            for part in ("save", "load")
        )
    size, ratio = saved["size"], (loaded["masters"] + loaded["added"]) / saved["size"]
    print(f"ZeRO stage {job['stage']}, {job['dtype']}, one rank, {saved['parameters'] / 1e6:.1f} M parameters")
    print(f"state: {size / 1e6:.0f} MB, {size / saved['parameters']:.3f} bytes per parameter")
    print(f"save: {saved['seconds']:.2f} s, {size / saved['seconds'] / 1e6:.0f} MB/s; +{saved['added'] / 1e6:.0f} MB")
    print(f"checksum of the file: {saved['checked']:.2f} s")
    print(f"load: {loaded['seconds']:.2f} s, {size / loaded['seconds'] / 1e6:.0f} MB/s")
    print(f"peak memory of the load: {ratio:.3f} times the state (limit {MOST:.2f})")
    return float(ratio)


def main() -> int:
    """Measure; or, given two files, run as one of the two processes."""
    if len(sys.argv) == 3 and sys.argv[1].endswith(".json"):
        job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        result = {"save": save, "load": load}[job["part"]](job)
        Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=500, help="size of the state (default: %(default)s)")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=2, help="default: %(default)s")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16", help="default: %(default)s")
    parser.add_argument("--folder", default=None, help="output folder (default: a temporary folder)")
    return int(measure(vars(parser.parse_args())) > MOST)


if __name__ == "__main__":
    raise SystemExit(main())
