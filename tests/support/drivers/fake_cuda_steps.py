"""Trains a step of every CELL on a fake GPU: ``python fake_cuda_steps.py LIBRARY RESULT.json METHOD/KIND ...``.

LIBRARY is built from ``data/fake_cuda.cpp``. The process group is ``cuda:fake``, which has no backend for tensors in
host memory, like NCCL's. Only ``torch.cuda``'s functions, DeepSpeed's accelerator and one product are replaced.
RESULT: for each cell the norm of the gradient and the waits of the host for the GPU, or what went wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # before torch

import json  # noqa: E402
import tempfile  # noqa: E402
import traceback  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from typing import Any  # noqa: E402
from unittest import mock  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from support.helpers import STAGES, make_model, options, paired_rows, unpaired_rows  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import alignment  # noqa: E402
from alignment.engines import launch_env  # noqa: E402
from alignment.models import packed_attention  # noqa: E402
from alignment.training.loop import TrainingLoop  # noqa: E402
from alignment.training.window import WindowPass  # noqa: E402

_LORA = {"use_peft": True, "lora_target_modules": "all-linear", "gradient_checkpointing": True}
KINDS: dict[str, dict[str, Any]] = {
    "full": {"deepspeed": STAGES["stage2"], "gradient_checkpointing": False},
    "lora": {"deepspeed": STAGES["stage0"], **_LORA},
    "qlora": {"deepspeed": STAGES["stage2"], **_LORA, "load_in_4bit": True},
    # Further ways, each with one method.
    "stage3": {"deepspeed": STAGES["stage3"]},
    "lora-stage3": {"deepspeed": STAGES["stage3"], **_LORA},
    "offload": {"deepspeed": STAGES["stage3-offload"]},
    "optimizer-offload": {"deepspeed": STAGES["stage2-offload"]},
    "reference-offload": {"deepspeed": STAGES["stage2"], "ref_placement": "offload"},
    "precomputed": {"deepspeed": STAGES["stage2"], "ref_placement": "precomputed"},
    "int8": {"deepspeed": STAGES["stage2"], **_LORA, "load_in_8bit": True},
    "dora": {"deepspeed": STAGES["stage2"], **_LORA, "use_dora": True},
    "activations": {"deepspeed": STAGES["stage2"], **_LORA, "activation_offloading": True},
    "tiled": {"deepspeed": STAGES["stage3"], **_LORA, "disable_dropout": False, "tiled_mlp": True},
    "reentrant": {"deepspeed": STAGES["stage2"], **_LORA, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}
KERNELS = torch.library.Library("aten", "IMPL")  # for operations that only a GPU has


PAGE_LOCKED: set[int] = set()  # addresses


class Event:
    """Replaces ``torch.cuda.Event``; the device has always reached it."""

    def __init__(self, **_: Any) -> None:
        self.record = self.synchronize = lambda: None
        self.query = lambda: True
        self.elapsed_time = lambda other: 0.0


class Stream:
    """Replaces ``torch.cuda.Stream``; its work is synchronous."""

    def __init__(self) -> None:
        self.wait_stream = self.wait_event = lambda other: None
        self.record_event, self.synchronize = Event, lambda: None


def register(address: int, *_: int) -> int:
    """Replaces ``cudaHostRegister``."""
    PAGE_LOCKED.add(address)
    return 0


def zero(*_: Any) -> int:
    """Replaces a function of ``torch.cuda``."""
    return 0


def start_device() -> None:
    """Make the fake GPU DeepSpeed's accelerator, and start the process group."""
    dist.init_process_group("cuda:fake", store=FakeStore(), rank=0, world_size=1)
    launch_env.init_distributed(use_cpu=True)
    from deepspeed.accelerator import get_accelerator

    names = "current_device memory_allocated memory_reserved max_memory_allocated reset_peak_memory_stats synchronize"
    success = SimpleNamespace(success=0)
    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=zero, cudaError=success)
    replaced: dict[str, Any] = {
        **dict.fromkeys([*names.split(), "_lazy_init", "set_rng_state"], zero),
        "Event": Event,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "cudart": lambda: runtime,
        "_cudart": runtime,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_device_capability": lambda *_: (8, 0),
        "mem_get_info": lambda *_: (2**34, 2**34),
        "get_per_process_memory_fraction": lambda *_: 1.0,
    }
    accelerator = {
        "device_name": lambda self, index=None: "cuda" if index is None else f"cuda:{index}",
        "current_device_name": lambda self: "cuda:0",
        "on_accelerator": lambda self, tensor: tensor.is_cuda,
        "FloatTensor": property(lambda self: partial(torch.tensor, dtype=torch.float32, device="cuda")),
        "ByteTensor": property(lambda self: partial(torch.tensor, dtype=torch.uint8, device="cuda")),
    }
    for owner, values in (
        (torch.cuda, replaced),
        (type(get_accelerator()), accelerator),
        (launch_env, {"_accelerator": lambda use_cpu: "cpu"}),
        (packed_attention, {"varlen_attn": None}),  # a kernel without a version for the host
    ):
        mock.patch.multiple(owner, **values).start()
    KERNELS.impl("mm.dtype", lambda left, right, dtype: left.to(dtype) @ right.to(dtype), "CUDA")


class Waits(TorchDispatchMode):
    """Records where the host waits for the GPU: values that are read, and copies from pageable memory.

    Those of libraries are left out: DeepSpeed compares the order of modules, and reduces with values on the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See :class:`TorchDispatchMode`."""
        result = func(*args, **(kwargs or {}))
        source = args[1] if func._schema.name == "aten::copy_" else args[0] if args else None
        made = result if isinstance(result, torch.Tensor) else None
        if made is not None and (kwargs or {}).get("pin_memory"):
            PAGE_LOCKED.add(made.untyped_storage().data_ptr())
        if isinstance(source, torch.Tensor):
            asynchronous = (kwargs or {}).get("non_blocking") or (len(args) > 2 and args[2] is True)
            host = next((end for end in (source, made) if end is not None and not end.is_cuda), None)
            if asynchronous and host is not None and host.untyped_storage().data_ptr() in PAGE_LOCKED:
                return result
            if source.is_cuda and (isinstance(result, (bool, int, float)) or (made is not None and not made.is_cuda)):
                self._note(f"{func} reads")
            elif not source.is_cuda and source.ndim and made is not None and made.is_cuda:
                self._note(f"{func} copies")
        return result

    def _note(self, what: str) -> None:
        """Record it if the innermost frame of a library or of this project is ours."""
        frame = sys._getframe(2)
        while frame.f_back is not None:
            parts = Path(frame.f_code.co_filename).parts
            if any(library in parts for library in ("deepspeed", "transformers", "peft", "bitsandbytes")):
                return
            if "alignment" in parts[:-1]:
                self.found.append(f"{what} at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
                return
            frame = frame.f_back


def trainer_of(method: str, kind: str, model: str, folder: Path) -> Any:
    """Return a trainer of one step of two micro-batches."""
    pairs = paired_rows(4)
    rows: list[dict[str, Any]] = unpaired_rows(4) if method == "KTO" else pairs
    given, more = options(folder, max_steps=1, bf16=True, use_cpu=True, **KINDS[kind]), {}
    if method == "OnlineDPO":
        del given["max_prompt_length"]
        given |= {"max_new_tokens": 4, "beta": 0.1}
        rows = [{"prompt": row["prompt"]} for row in pairs]
        more["reward_funcs"] = lambda prompts, completions, **_: [float(sum(map(ord, text))) for text in completions]
    if method == "SFT":
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs]
    made = getattr(alignment, f"{method}Config")(**given)
    return getattr(alignment, f"{method}Trainer")(model=model, args=made, train_dataset=rows, **more)


def step(method: str, kind: str, model: str, folder: Path) -> tuple[float, list[str], list[str]]:
    """Train one step; return the norm of the gradient, and the waits in micro-batches and in the whole update."""
    within, whole = Waits(), Waits()
    micro_batch, update = WindowPass._micro_batch, TrainingLoop._update

    def observed(*args: Any) -> torch.Tensor:
        with within:
            return micro_batch(*args)

    def updated(*args: Any) -> Any:
        with whole:
            return update(*args)

    trainer = trainer_of(method, kind, model, folder)
    try:
        with (
            mock.patch.object(WindowPass, "_micro_batch", observed),
            mock.patch.object(TrainingLoop, "_update", updated),
        ):
            trainer.train()
        trained = [p for p in trainer.engines.policy.scorer.parameters() if p.requires_grad]
        assert trained and all(p.device == torch.device("cuda", 0) for p in trainer.model.parameters())
        norm = next(record["grad_norm"] for record in trainer.state.log_history if "grad_norm" in record)
        return norm, within.found, whole.found
    finally:
        trainer.close()


def main() -> None:
    """Train every cell, and write the results."""
    start_device()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        model = make_model(Path(name) / "model", "untied")
        for cell in sys.argv[3:]:
            try:
                found[cell] = step(*cell.split("/"), model, Path(name) / cell)
            except Exception as error:
                found[cell] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
