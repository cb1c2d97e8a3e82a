"""Rows in every format, models of several families, and the loss of a trainer on them: TRL's or this project's.

As a script (``python tests/support/losses_of_trl.py JOBS.json LOSSES.json``) it uses the installed TRL in a
separate process, because each side prepares process and libraries in its own way.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

# Words of several tokens, and completions that differ from their first letter on: the two projects split texts with a
# longer common prefix differently.
PAIRS = (
    ("Name a colour of the sky.", "It is mostly blue by day.", "Green, never anything else!"),
    ("How many legs has a spider?", "Eight.", "Perhaps two or three of them."),
    ("Say hello politely", "Good morning to you, and welcome.", "Why?"),
    ("What is 2 + 2?", "4", "The answer to that is 5."),
)


def said(*contents: str) -> list[dict[str, str]]:
    """Return alternating messages of user and assistant."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def answered(content: str) -> list[dict[str, str]]:
    """Return one assistant message."""
    return [{"role": "assistant", "content": content}]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "count",
            "description": "Counts legs.",
            "parameters": {"type": "object", "properties": {"animal": {"type": "string", "description": "which"}}},
        },
    }
]


def pairs(kind: str) -> list[dict[str, Any]]:
    """Return rows with a chosen and a rejected completion."""
    rows = []
    for prompt, good, bad in PAIRS:
        if kind == "standard":
            rows.append({"prompt": prompt, "chosen": f" {good}", "rejected": f" {bad}"})
        elif kind == "implicit":
            rows.append({"chosen": f"{prompt} {good}", "rejected": f"{prompt} {bad}"})
        elif kind == "conversational_implicit":
            rows.append({"chosen": said(prompt, good), "rejected": said(prompt, bad)})
        else:
            rows.append({"prompt": said(prompt), "chosen": answered(good), "rejected": answered(bad)})
        if kind == "tools":
            rows[-1]["tools"] = TOOLS
    return rows


def unpaired(kind: str) -> list[dict[str, Any]]:
    """Return two rows with a completion and a label, which can only be each other's partners."""
    (prompt, good, _), (other, _, bad) = PAIRS[:2]
    if kind == "standard":
        rows: list[dict[str, Any]] = [
            {"prompt": prompt, "completion": f" {good}"},
            {"prompt": other, "completion": f" {bad}"},
        ]
    else:
        rows = [{"prompt": said(p), "completion": answered(a)} for p, a in ((prompt, good), (other, bad))]
    return [
        {**row, "label": label, **({"tools": TOOLS} if kind == "tools" else {})}
        for row, label in zip(rows, (True, False))
    ]


def examples(kind: str) -> list[dict[str, Any]]:
    """Return rows for SFT."""
    rows: list[dict[str, Any]] = []
    for prompt, good, _ in PAIRS:
        if kind == "text":
            rows.append({"text": f"{prompt} {good}"})
        elif kind == "messages":
            rows.append({"messages": said(prompt, good)})
        elif kind == "standard":
            rows.append({"prompt": prompt, "completion": f" {good}"})
        else:
            rows.append({"prompt": said(prompt), "completion": answered(good)})
        if kind == "tools":
            rows[-1]["tools"] = TOOLS
    return rows


def prompts(kind: str) -> list[dict[str, Any]]:
    """Return rows for Online DPO."""
    return [{"prompt": prompt if kind == "standard" else said(prompt)} for prompt, _, _ in PAIRS]


def reward(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """Return the length as the reward."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(len(text)) for text in texts]


def completions(tokenizer: Any, prompt: list[int]) -> list[list[int]]:
    """Return two fixed completions of a prompt instead of generated ones."""
    text = tokenizer.decode(prompt)
    (answers,) = [answers for asked, *answers in PAIRS if asked in text]
    ids = [tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in answers]
    return [[*each, tokenizer.eos_token_id] for each in ids]


def rows_of(method: str, kind: str) -> list[dict[str, Any]]:
    """Return the rows of a job."""
    if method == "online_dpo":
        return prompts(kind)
    if method == "sft":
        return examples(kind)
    if method == "kto" and not kind.startswith("paired_"):
        return unpaired(kind)
    rows = pairs(kind.removeprefix("paired_"))
    return rows[:1] if method == "kto" else rows


def options_of(job: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the options used by both sides."""
    return {
        "output_dir": f"{folder}/{job['name']}",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        **(ONE_STEP if job["method"] == "online_dpo" else {}),
        **job["options"],
    }


NAMES = {"kto": "KTO", "cpo": "CPO", "dpo": "DPO", "sft": "SFT", "reward": "Reward", "online_dpo": "OnlineDPO"}
ONE_STEP = {"max_steps": 1, "learning_rate": 0.0, "logging_steps": 1, "save_strategy": "no", "max_new_tokens": 32}


def loss_of_trl(job: dict[str, Any], folder: str) -> float:
    """Return TRL's loss on the rows of a job, in one fp32 batch: of an evaluation, or of the Online DPO step."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental import cpo, online_dpo

    method, home = job["method"], {"cpo": cpo, "online_dpo": online_dpo}.get(job["method"], trl)
    config, trainer = (getattr(home, NAMES[method] + part) for part in ("Config", "Trainer"))
    auto = AutoModelForSequenceClassification if method == "reward" else AutoModelForCausalLM
    model = auto.from_pretrained(job["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    rows = Dataset.from_list(rows_of(method, job["kind"]))
    more: dict[str, Any] = {} if method == "online_dpo" else {"eval_dataset": rows}
    if method in ("kto", "dpo", "online_dpo"):
        more["ref_model"] = AutoModelForCausalLM.from_pretrained(job["reference"], dtype=torch.float32)
    if method == "online_dpo":
        more["reward_funcs"] = reward
    arguments = config(**options_of(job, folder))
    made = trainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, **more)
    if method != "online_dpo":
        return float(made.evaluate()["eval_loss"])

    def generate(input_ids: Any, attention_mask: Any, **_: Any) -> Any:
        asked = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask)]
        half = len(asked) // 2
        answers = [completions(tokenizer, prompt)[number >= half] for number, prompt in enumerate(asked)]
        longest = max(map(len, answers))
        padded = [answer + [tokenizer.pad_token_id] * (longest - len(answer)) for answer in answers]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)

    losses: list[float] = []
    step = made.training_step

    def recorded(*given: Any, **more: Any) -> Any:
        losses.append(float(loss := step(*given, **more)))
        return loss

    model.generate, made.training_step = generate, recorded  # the log is rounded
    made.train()
    return losses[0]


def loss_of_ours(job: dict[str, Any], folder: str) -> float:
    """Return this project's loss."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    import alignment
    from alignment.rollout.backend import Completion, RolloutRequest
    from alignment.rollout.engine import RolloutEngine

    method = job["method"]
    config, trainer = (getattr(alignment, NAMES[method] + part) for part in ("Config", "Trainer"))
    rows = Dataset.from_list(rows_of(method, job["kind"]))
    more: dict[str, Any] = {"ref_model": job["reference"]} if method in ("kto", "dpo", "online_dpo") else {}
    if method != "online_dpo":
        made = trainer(model=job["model"], args=config(**options_of(job, folder)), eval_dataset=rows, **more)
        try:
            return float(made.evaluate()["eval_loss"])
        finally:
            made.close()
    tokenizer = AutoTokenizer.from_pretrained(job["model"])

    def generate(engine: RolloutEngine, request: RolloutRequest) -> list[list[Completion]]:
        return [
            [Completion(tuple(ids), True) for ids in completions(tokenizer, list(prompt))]
            for prompt in request.prompts
        ]

    with mock.patch.object(RolloutEngine, "generate", generate):
        arguments = config(**options_of(job, folder))
        made = trainer(model=job["model"], args=arguments, train_dataset=rows, reward_funcs=reward, **more)
        try:
            made.train()
            return float(made.state.log_history[0]["loss"])
        finally:
            made.close()


def main(jobs: str, results: str) -> None:
    """Write TRL's losses of the jobs in a file by name, or the text of an error."""
    found: dict[str, Any] = {}
    for job in json.loads(Path(jobs).read_text()):
        try:
            found[job["name"]] = loss_of_trl(job, str(Path(results).parent / "trl"))
        except Exception as error:
            found[job["name"]] = f"{type(error).__name__}: {error}"[:600]
        Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    main(*sys.argv[1:])
