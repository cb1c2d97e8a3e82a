"""Short runs of Online DPO whose completions come from a :class:`~support.fake_vllm.FakeVLLM`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alignment import OnlineDPOConfig, OnlineDPOTrainer

PROMPTS = ("abc", "defgh", "ij", "klmno")


def sums(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward: the sum of the token ids."""
    return [float(sum(ids)) for ids in completion_ids]


def prefer(prompts: list[Any], pairs: list[list[str]]) -> list[int]:
    """A judge: the text that comes first in the alphabet."""
    return [int(second < first) for first, second in pairs]


def make(
    url: str | None,
    model: Any,
    folder: Path,
    *callbacks: Any,
    rows: int = 4,
    reward: Any = sums,
    judged: bool = False,
    **more: Any,
) -> OnlineDPOTrainer:
    """Return a trainer of three steps of two micro-batches of two prompts."""
    options: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_length": 64,
        "max_new_tokens": 6,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "rollout_backend": "vllm",
        "vllm_server_base_url": url,
        "vllm_server_timeout": 3.0,
        "deepspeed": {"zero_optimization": {"stage": 0}},
        **more,
    }
    prompts = [{"prompt": PROMPTS[number % 4] + "x" * (number // 4)} for number in range(rows)]
    return OnlineDPOTrainer(
        model=model,
        args=OnlineDPOConfig(**options),
        train_dataset=prompts,
        eval_dataset=prompts[:2],
        reward_funcs=None if judged else reward,
        judge=prefer if judged else None,
        callbacks=list(callbacks),
    )
