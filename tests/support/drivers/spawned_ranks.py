"""Two ranks started by a script, without a launcher, that train one step: spawned_ranks.py MODEL FOLDER PORT."""

from __future__ import annotations

import json
import os
import sys

import torch
from support.helpers import paired_rows

from alignment import CPOConfig, CPOTrainer
from alignment.run.ranks import local_rank, rank, world_size
from tools.ranks.client import LAUNCHER_VARIABLES


def work(number: int, model: str, folder: str, port: str) -> None:
    """Train, and print what this rank knows about itself."""
    where = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=where, rank=number, world_size=2)
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 1, "max_length": 64}
    args = CPOConfig(folder, use_cpu=True, save_strategy="no", disable_tqdm=True, **sizes)
    trainer = CPOTrainer(model=model, args=args, train_dataset=paired_rows(8))
    trainer.train()
    known = [rank(), local_rank(), world_size(), os.environ["LOCAL_WORLD_SIZE"], args.window_size]
    os.write(1, f"{json.dumps(known)}\n".encode())  # in one write, so that lines do not mix
    trainer.close()


if __name__ == "__main__":
    for name in LAUNCHER_VARIABLES:  # of the test
        os.environ.pop(name, None)
    torch.multiprocessing.start_processes(work, args=tuple(sys.argv[1:]), nprocs=2, start_method="fork")
