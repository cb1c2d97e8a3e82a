"""Online DPO with completions from a server that follows vLLM's protocol: versions, weights, and faults."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_vllm import GENERATE, FakeVLLM
from support.helpers import make_model, train_and_close

from alignment import OnlineDPOConfig, OnlineDPOTrainer
from alignment.config.errors import OptionError, TrainingError


class Weights:
    """Sends full weights that every rank holds."""

    def __init__(self, client: Any, policy: Any, adapters: Any, source: Any, folder: Path) -> None:
        self.client, self.policy = client, policy

    def update(self, version: str) -> str:
        self.policy.scorer.model.save_pretrained("/tmp/va_weights")
        self.client.reload(Path("/tmp/va_weights"))
        self.client.set_version(version)
        return "base"

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "alignment.rollout.vllm.weights", types.SimpleNamespace(WeightSync=Weights))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture
def server(model: str) -> Iterator[FakeVLLM]:
    with FakeVLLM(model).running() as server:
        yield server


def trainer_of(server: FakeVLLM, folder: Path, **more: Any) -> OnlineDPOTrainer:
    options = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2, "max_length": 64, "max_new_tokens": 8, "max_steps": 3, "logging_steps": 1,
        "save_strategy": "no", "disable_tqdm": True, "rollout_backend": "vllm", "vllm_server_base_url": server.url,
        "vllm_server_timeout": 3.0, "deepspeed": {"zero_optimization": {"stage": 0}}, **more,
    }  # fmt: skip
    prompts = [{"prompt": text} for text in ("abc", "defgh", "ij", "klmno")]
    return OnlineDPOTrainer(
        model=server.folder, args=OnlineDPOConfig(**options), train_dataset=prompts,
        reward_funcs=lambda completion_ids: [float(sum(ids)) for ids in completion_ids],
    )  # fmt: skip


def test_run(server: FakeVLLM, tmp_path: Path) -> None:
    trainer = train_and_close(trainer_of(server, tmp_path))
    print(trainer.state.log_history)
    print(server.paths())
