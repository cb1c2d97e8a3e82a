"""The limits of numeric options: the last value that is accepted, and the first one beyond it that is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from alignment.config.errors import OptionError
from alignment.methods.cpo_options import CPOConfig
from alignment.methods.dpo_options import DPOConfig
from alignment.methods.kto_options import KTOConfig
from alignment.methods.online_dpo_options import OnlineDPOConfig
from alignment.methods.reward_options import RewardConfig

TINY, ALMOST_ONE = math.ulp(0.0), math.nextafter(1, 0)
BELOW_ZERO, ABOVE_ONE = -TINY, math.nextafter(1, 2)
AT_LEAST_ONE = [
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("dataset_num_proc", "max_train_samples", "max_eval_samples", "max_steps", "lora_r"),
    *("lora_alpha", "max_bad_steps"),
]
AT_LEAST_ZERO = [
    *("learning_rate", "weight_decay", "max_grad_norm", "router_aux_loss_coef", "warmup_steps", "eval_delay"),
    *("retry_pause",),
]
ABOVE_ZERO = ["adam_epsilon", "hang_timeout", "hang_factor", "num_train_epochs"]
NEEDS: dict[str, dict[str, Any]] = {  # options with which another one has an effect
    "per_device_train_batch_size": {"loss_type": "apo_zero_unpaired"},
    "lora_r": {"use_peft": True},
    "lora_alpha": {"use_peft": True},
    "lora_dropout": {"use_peft": True},
    "max_bad_steps": {"on_bad_step": "skip"},
}
ROWS: list[tuple[type, str, Any, Any]] = [
    *((KTOConfig, name, 1, 0) for name in AT_LEAST_ONE),
    *((KTOConfig, name, 0, BELOW_ZERO) for name in AT_LEAST_ZERO),
    *((KTOConfig, name, 0, -1) for name in ("dataloader_num_workers", "seed", "data_seed", "retries")),
    *((KTOConfig, name, TINY, 0) for name in ABOVE_ZERO),
    *((KTOConfig, name, ALMOST_ONE, 1) for name in ("adam_beta1", "adam_beta2", "warmup_ratio", "lora_dropout")),
    *((KTOConfig, name, 0, BELOW_ZERO) for name in ("adam_beta1", "adam_beta2", "warmup_ratio", "lora_dropout")),
    *((KTOConfig, name, ALMOST_ONE, 1.5) for name in ("logging_steps", "save_steps", "eval_steps", "warmup_steps")),
    *((KTOConfig, name, 1, 0) for name in ("logging_steps", "save_steps", "eval_steps")),
    (KTOConfig, "max_steps", -1, -2),
    (KTOConfig, "save_total_limit", 1, -2),  # 0 and -1: no limit, as in transformers
    (KTOConfig, "seed", 2**32 - 1, 2**32),
    (KTOConfig, "peer_timeout", 5, math.nextafter(5, 0)),
    (KTOConfig, "loss_spike_factor", ABOVE_ONE, 1),
    (KTOConfig, "max_length", 2, 1),
    (KTOConfig, "max_tokens_per_batch", 1024, 1023),
    (CPOConfig, "max_tokens_per_batch", 2048, 2047),
    *((cls, "beta", TINY, 0) for cls in (KTOConfig, CPOConfig, DPOConfig, OnlineDPOConfig)),
    *((KTOConfig, name, 0, BELOW_ZERO) for name in ("desirable_weight", "undesirable_weight")),
    *((cls, "label_smoothing", math.nextafter(0.5, 0), 0.5) for cls in (CPOConfig, DPOConfig)),
    *((cls, "label_smoothing", 0, BELOW_ZERO) for cls in (CPOConfig, DPOConfig)),
    (CPOConfig, "cpo_alpha", 0, BELOW_ZERO),
    (RewardConfig, "center_rewards_coefficient", 0, BELOW_ZERO),
    *((OnlineDPOConfig, name, 1, 0) for name in ("max_new_tokens", "rollout_batch_size", "reward_batch_size")),
    *((OnlineDPOConfig, name, 1, 0) for name in ("num_completions_to_log", "max_windows_without_pairs", "top_p")),
    *((OnlineDPOConfig, name, 0, -2) for name in ("top_k", "log_completions")),
    *((OnlineDPOConfig, name, TINY, 0) for name in ("repetition_penalty", "temperature", "top_p")),
    *((OnlineDPOConfig, name, 1, ABOVE_ONE) for name in ("top_p", "min_p")),
    *((OnlineDPOConfig, name, 0, BELOW_ZERO) for name in ("min_p", "missing_eos_penalty")),
    (OnlineDPOConfig, "num_generations", 2, 1),
    (OnlineDPOConfig, "max_length", 65, 64),
]


@pytest.mark.parametrize(("cls", "name", "last", "beyond"), ROWS)
def test_the_last_value_within_a_limit_and_the_first_beyond(cls: type, name: str, last: Any, beyond: Any) -> None:
    further = NEEDS.get(name, {})
    assert getattr(cls("out", **{name: last}, **further), name) == last
    with pytest.raises(OptionError) as caught:
        cls("out", **{name: beyond}, **further)
    assert str(caught.value).startswith((f"{name}={beyond!r}", f"{name}={float(beyond)!r}"))
