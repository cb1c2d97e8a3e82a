"""One row of the GPU table, in this process: ``python -m benchmarks.gpu_row JOB.json RESULT.json``."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import DeviceClock, arbitrary, cap_memory, memory_bytes, peak_of_phases
from benchmarks.shapes import Shape, load_tokenizer


@dataclass(frozen=True)
class RowJob:
    """The training run of one row.

    Attributes:
        method: ``kto``, ``cpo`` or ``online_dpo``.
        policy: name of a file in ``ds_configs/``.
        reference: ``ref_placement``; None for CPO.
        model: folder of model and tokenizer.
        output: an empty folder.
        shape: of model and rows, as the fields of :class:`Shape`.
        batch: rows per step.
        steps: optimizer steps.
        cpu: train on the CPU.
        limit: maximum bytes of GPU memory that this process may allocate.
    """

    method: str
    policy: str
    reference: str | None
    model: str
    output: str
    shape: dict[str, Any]
    batch: int
    steps: int
    cpu: bool
    limit: int

    @property
    def name(self) -> str:
        """``kto/zero2/offload``, for messages and for selecting rows."""
        return "/".join(filter(None, (self.method, self.policy, self.reference)))


@dataclass(frozen=True)
class RowResult:
    """Seconds per step (median without the first), bytes (0 on a CPU, where it is not measured) and tokens per second.

    ``allocated`` is the maximum over all phases of training, without loading the model.
    """

    step: float
    allocated: int
    reserved: int
    host: int
    tokens_per_second: float


class _Watch(DeviceClock):
    """Also records the number of tokens seen at the end of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.tokens.append(int(state.num_input_tokens_seen))
        super().on_step_end(args, state, control, **kwargs)


def train(job: RowJob) -> RowResult:
    """Train the row's steps and measure them; the first step is not timed.

    Raises:
        RuntimeError: if the loss is not finite.
    """
    if not job.cpu:
        cap_memory(job.limit)
    trainer = _trainer(job)
    watch = _Watch()
    trainer.add_callback(watch)
    loss = trainer.train().training_loss
    if not math.isfinite(loss):
        raise RuntimeError(f"the mean loss of {job.steps} steps is {loss}")
    steps = [instant.wall for instant in watch.steps(1)]
    peak = peak_of_phases(trainer)
    trainer.close()
    return RowResult(
        step=sorted(steps)[len(steps) // 2],
        allocated=0 if job.cpu else peak,
        reserved=watch.reserved,
        host=memory_bytes("VmHWM"),
        tokens_per_second=(watch.tokens[-1] - watch.tokens[0]) / sum(steps),
    )


def _trainer(job: RowJob) -> Any:
    from alignment.config.registry import METHODS as CONFIGS
    from benchmarks.jobs import METHODS

    options: dict[str, Any] = {
        "output_dir": job.output,
        "deepspeed": job.policy,
        "max_steps": job.steps,
        "per_device_train_batch_size": job.batch,
        "max_length": job.shape["most"],
        "include_num_input_tokens_seen": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": job.cpu,
    }
    if job.reference is not None:
        options["ref_placement"] = job.reference
    more: dict[str, Any] = {}
    if job.method == "online_dpo":
        more["reward_funcs"] = arbitrary
        options["max_new_tokens"] = job.shape["most"] // 8
    else:
        options["max_prompt_length"] = job.shape["most"] // 2
    rows = METHODS[job.method].rows(Shape(**job.shape), job.batch * job.steps, 0)
    args = CONFIGS[job.method](**options)
    return CONFIGS.trainer(args)(
        model=job.model,
        args=args,
        train_dataset=rows,
        processing_class=load_tokenizer(job.model),
        **more,
    )


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result = train(RowJob(**json.loads(job_file.read_text(encoding="utf-8"))))
    result_file.write_text(json.dumps(asdict(result)), encoding="utf-8")
