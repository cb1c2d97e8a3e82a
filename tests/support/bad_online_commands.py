"""Invalid commands of Online DPO and reward model training; see ``bad_commands``."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from support.bad_case import CHAT, Case, deepspeed_case
from support.data_tokenizers import PLAIN, char_tokenizer
from support.helpers import POSITIONS, tiny_config

REWARDS = "def letters(completions, **columns): return [float(len(text)) for text in completions]\n"
FUNCTION = {"reward_funcs": "@rewards.py:letters"}
FILES = {"rewards.py": REWARDS}


def online(name: str, *says: str, data: object = None, files: dict[str, str] | None = None, **options: str) -> Case:
    """An invalid Online DPO command with a reward function, unless ``options`` set another source of rewards."""
    sources = ("reward_funcs", "reward_model_path", "judge")
    given = options if set(options) & set(sources) else {**FUNCTION, **options}
    return Case(name, says, dict(given), data=data, method="online_dpo", files={**FILES, **(files or {})})  # type: ignore[arg-type]


ONLINE = [
    Case("nothing scores", ("reward_model_path=None", "reward_funcs", "judge"), method="online_dpo"),
    online(
        "judge and rewards",
        "judge='@judges.py:Judge'",
        "reward_funcs='@rewards.py:letters'",
        "remove one of them",
        judge="@judges.py:Judge",
        reward_funcs="@rewards.py:letters",
    ),
    online("vllm is not used", "vllm_server_port=8001", "rollout_backend: auto", "remove it", vllm_server_port="8001"),
    online("address of vllm", "vllm_server_base_url: expected http://HOST", vllm_server_base_url="http://h:1/v1"),
    online("no room", "max_length=96", "no tokens for the prompt", "max_new_tokens=96", max_new_tokens=str(POSITIONS)),
    online(
        "prompts too long",
        "@data.jsonl: all 2 rows were dropped (2 × prompt longer than 16 tokens)",
        "max_length",
        "max_new_tokens",
        data=[{"prompt": "a" * 40}] * 2,
        max_new_tokens="80",
    ),
    online("no prompt", "@data.jsonl: missing column prompt", "Online DPO", "text", data=[{"text": "a"}] * 2),
    online("no reward model", "reward_model_path: folder '@none' does not exist", reward_model_path="@none"),
    online(
        "file without a function", "reward_funcs='@rewards.py'", "expected file.py:name", reward_funcs="@rewards.py"
    ),
    online("language model as reward model", "reward_model_path", "score", "reward", reward_model_path="%good"),
    online("three labels", "reward_model_path", "num_labels=3", reward_model_path="%three-labels"),
    online(
        "no template of the reward model's",
        "reward_processing_class: @data.jsonl, row 1 is conversational",
        "no chat template",
        data=[{"prompt": CHAT["prompt"]}] * 2,
        reward_model_path="%classifier-no-template",
    ),
    deepspeed_case(
        "stage 2 reward model",
        {"zero_optimization": {"stage": 2}},
        "@reward_deepspeed.json: zero_optimization.stage=2: a frozen model requires stage 3",
        key="reward_deepspeed",
        method="online_dpo",
        reward_model_path="%classifier",
    ),
]


def write_classifiers(folder: Path) -> None:
    """Write ``classifier`` and copies of it with one defect each to ``folder``."""
    for name, labels in (("classifier", 1), ("three-labels", 3), ("classifier-no-template", 1)):
        config = tiny_config("tied")
        config.num_labels = labels
        torch.manual_seed(0)
        AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder / name)
        template = {} if "no-template" in name else {"template": PLAIN}
        char_tokenizer(**template).save_pretrained(folder / name)
