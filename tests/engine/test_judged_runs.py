"""Online DPO with a judge at an endpoint: training uses its preferences, and the API key is written nowhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.drivers.canned import LONGEST
from support.drivers.runs import canned
from support.helpers import make_model, options, paired_rows
from support.judge_server import Answer, serving

from alignment import OnlineDPOConfig, OnlineDPOTrainer
from alignment.config.errors import RewardError
from alignment.rollout.engine import RolloutEngine

KEY = "sk-secret-0123456789"
ROWS = [{"prompt": row["prompt"]} for row in paired_rows(8, 3)]
RESPONSES = re.compile(r'<response id="[01]">\n(.*?)\n</response>', re.DOTALL)

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("own_process_group")]


def longer(text: str) -> Answer:
    first, second = RESPONSES.findall(text)
    return Answer("0" if (len(first), first) > (len(second), second) else "1")


def by_length(prompts: list[str], pairs: list[list[str]]) -> list[int]:
    return [0 if (len(first), first) > (len(second), second) else 1 for first, second in pairs]


def train(folder: Path, judge: Any) -> list[dict[str, Any]]:
    given = options(folder, max_steps=2, max_new_tokens=LONGEST, save_strategy="steps", save_steps=1)
    given |= {"output_dir": str(folder / "out"), "gradient_accumulation_steps": 1, "report_to": "tensorboard"}
    del given["max_prompt_length"]
    option = {"judge": judge} if isinstance(judge, dict) else {}
    args, more = OnlineDPOConfig(**given, **option), {} if option else {"judge": judge}
    trainer = OnlineDPOTrainer(str(folder.parent / "model"), args=args, train_dataset=ROWS, **more)
    try:
        trainer.train()
        trainer.save_model()
    finally:
        trainer.close()
    return [entry for entry in trainer.state.log_history if "grad_norm" in entry]


def test_a_judge_with_an_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RolloutEngine, "generate", canned)
    monkeypatch.setenv("JUDGE_KEY", KEY)
    make_model(tmp_path / "model", layers=1)
    plain = train(tmp_path / "plain", by_length)
    spec: dict[str, Any] = {"model": "m", "api_key_env": "JUDGE_KEY", "retries": 1}
    troubles = iter([Answer(status=503), Answer(status=429), Answer("0", cut=True)])
    with serving(lambda text: next(troubles, None) or longer(text)) as server:
        asked = train(tmp_path / "asked", spec | {"base_url": server.url, "retries": 4})
        assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert asked == plain and plain[0]["pairs/dropped"] < 1  # both orders agree, so pairs equal those of a function
    answered = [0]

    def dies(text: str) -> Answer:
        answered[0] += 1
        return longer(text) if answered[0] <= 5 else Answer(status=500)

    with serving(dies) as server:
        with pytest.raises(RewardError, match=rf"^step 2: judge m at {server.url}: HTTP 500"):
            train(tmp_path / "dies", spec | {"base_url": server.url})
        url = server.url
    assert (tmp_path / "dies" / "out" / "checkpoint-1").is_dir()
    with pytest.raises(RewardError, match=f"^judge m at {url}: APIConnectionError"):
        train(tmp_path / "gone", spec | {"base_url": url})
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file
    assert KEY not in capsys.readouterr().out
