"""``generate_during_eval``: written completions; training is not affected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DRIVERS
from peft import PeftModel
from safetensors.torch import load_file
from support.data_tokenizers import PLAIN, char_tokenizer
from support.drivers.eval_answers import PROMPTS, rows_of
from support.helpers import make_model
from support.resume_comparison import timeless
from transformers import AutoModelForCausalLM, GenerationConfig

from tools.ranks import RankServer

# New adapters are zero, so disabling them has no effect at the start.
MOVED = {"learning_rate": 5.0, "eval_on_start": False}
CASES: list[dict[str, Any]] = [
    {"name": name, "method": method, "args": {"deepspeed": stage, **args}, **more}
    for name, method, stage, args, more in (
        ("replica", "KTO", "stage0", {"ref_placement": "replica"}, {"reference": True}),
        ("sharded", "DPO", "stage3", {"ref_placement": "sharded"}, {"reference": True}),
        ("offload", "DPO", "stage2", {"ref_placement": "offload"}, {}),
        ("adapter", "KTO", "stage2", MOVED, {"lora": True}),
        ("adapter-3", "DPO", "stage3", MOVED, {"lora": True}),
        ("none", "CPO", "stage3-offload", {}, {}),
        ("precomputed", "DPO", "stage0", {"ref_placement": "precomputed"}, {}),
    )
]


def greedy(folder: Path, prompts: list[str], adapters: Path | None = None) -> list[str]:
    """Return what transformers generates with a saved model, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapters is not None:
        model = PeftModel.from_pretrained(model, adapters)
    tokenizer, found = char_tokenizer(template=PLAIN), []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=1)
        made = model.eval().generate(ids, generation_config=config, attention_mask=torch.ones_like(ids))
        found.append(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
    return found


@pytest.mark.parametrize(
    ("nproc", "names"),
    [
        pytest.param(2, ("sharded", "adapter", "none", "precomputed"), marks=pytest.mark.ci, id="some"),
        *(pytest.param(nproc, tuple(each["name"] for each in CASES), marks=pytest.mark.slow) for nproc in (1, 2)),
    ],
)
def test_tables_do_not_affect_the_run(tmp_path: Path, ranks: RankServer, nproc: int, names: tuple[str, ...]) -> None:
    cases = [case for case in CASES if case["name"] in names]
    make_model(tmp_path / "model", "untied", seed=1)
    make_model(tmp_path / "reference", "untied", seed=2)
    for name in ("model", "reference"):  # top_k=1: sampling equals greedy decoding
        GenerationConfig(do_sample=True, top_k=1, eos_token_id=1).save_pretrained(tmp_path / name)
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    result = ranks.run(DRIVERS / "eval_answers.py", tmp_path, tmp_path / "cases.json", nproc=nproc, timeout=400)
    assert "dpo has no reference" not in result.stdout and result.stdout.count("cpo has no reference, so the") == 1
    assert result.stdout.count("a precomputed reference has no model, so the tables") == 1
    for case in cases:
        plain, sampled = json.loads((tmp_path / f"{case['name']}.json").read_text())
        assert [*map(timeless, sampled)] == [*map(timeless, plain)], case["name"]
        check_tables(tmp_path, case)


def check_tables(folder: Path, case: dict[str, Any]) -> None:
    """Check the weights and the table of a run."""
    file = "adapter_model.safetensors" if case.get("lora") else "model.safetensors"
    found, wanted = (load_file(folder / name / file) for name in (case["name"], f"{case['name']}-plain"))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    rows = [json.loads(line) for line in (folder / case["name"] / "completions.jsonl").read_text().splitlines()]
    prompts = list(dict.fromkeys(row["prompt"] for row in rows_of(case["method"])))[:PROMPTS]
    steps = (0, 1, 2) if case["args"].get("eval_on_start", True) else (1, 2)
    assert len(prompts) == PROMPTS and [row["step"] for row in rows] == [step for step in steps for _ in prompts]
    assert [row["prompt"] for row in rows] == prompts * len(steps)
    assert {row["dataset"] for row in rows} == {"eval"}
    saved = folder / case["name"]
    start = greedy(folder / "model", prompts)
    end = greedy(folder / "model", prompts, saved) if case.get("lora") else greedy(saved, prompts)
    policy = [row["policy"] for row in rows]
    assert policy[-PROMPTS:] == end != start and (steps[0] > 0 or policy[:PROMPTS] == start), case["name"]
    if case["name"] in ("none", "precomputed"):
        assert all("reference" not in row for row in rows)
    else:
        reference = greedy(folder / "reference", prompts) if case.get("reference") else start
        assert [row["reference"] for row in rows] == reference * len(steps), case["name"]
