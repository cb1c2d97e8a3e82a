"""Every recipe with adapters, run for two steps with a tiny model of its model family."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.data_tokenizers import PLAIN, char_tokenizer
from support.helpers import POSITIONS, make_classifier, make_model, paired_rows, unpaired_rows
from support.tiny_experts import make_experts
from transformers import Qwen2Config, Qwen2ForCausalLM

from alignment.cli.parsing import parse
from alignment.cli.train_job import run

ADAPTED = ("kto_qlora_8b", "kto_lora_8b", "cpo_qlora_8b", "cpo_lora_8b", "kto_qlora_14b", "cpo_qlora_14b")
MIXTURES = ("kto_qlora_30b_a3b", "cpo_qlora_30b_a3b")
TWO_STEPS = (
    *("--use_cpu", "--disable_tqdm", "--max_steps", "2", "--gradient_accumulation_steps", "2", "--logging_steps", "1"),
    *("--max_length", str(POSITIONS), "--bf16"),  # as on a GPU
)

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("library_bars")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny models of the recipes' model families and a reward model, saved in bf16 like the real ones."""
    folder = tmp_path_factory.mktemp("recipes")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(char_tokenizer()) + 3,  # AutoTokenizer selects Qwen2's class, which adds tokens
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        eos_token_id=1,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "qwen")
    char_tokenizer(template=PLAIN).save_pretrained(folder / "qwen")
    return {
        "Qwen": str(folder / "qwen"),
        "Qwen mixture": make_experts(folder / "experts", "qwen3_moe"),
        "meta-llama": make_model(folder / "llama", "untied"),
        "reward": make_classifier(folder / "reward", "untied"),
    }


def two_steps(recipe: str, models: dict[str, str], folder: Path, rows: list[dict[str, Any]], *more: str) -> list[Any]:
    """Run the command with a recipe; return the logged steps."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = str(parse([recipe, "--output_dir", "out", "--dataset_name", "rows.jsonl"]).model_name_or_path)
    family = named.partition("/")[0] + (" mixture" if recipe in MIXTURES else "")
    arguments = ["--model_name_or_path", models[family], "--dataset_name", str(data)]
    run(parse([recipe, *arguments, "--output_dir", str(folder / "out"), *TWO_STEPS, *more]))
    lines = [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]
    assert "learning_rate=" not in (folder / "out" / "report.md").read_text(), (
        "the learning rate is suitable for adapters"
    )
    return [line for line in lines if "loss" in line]


def trained(folder: Path, bits: int | None, each: int = 7) -> dict[str, torch.Tensor]:
    """Check the saved adapters: each linear layer of both decoder layers has one, in bf16, with nonzero matrices."""
    base = json.loads((folder / "training_base.json").read_text())
    assert bool(base["quantization"] and base["quantization"]["load_in_4bit"]) == (bits == 4)
    assert not list(folder.glob("model*.safetensors")), "adapters only"
    state = load_file(folder / "adapter_model.safetensors")
    assert len(state) == 2 * 2 * each and all(value.dtype == torch.bfloat16 for value in state.values())
    assert all(bool(value.any()) for value in state.values())
    return state


@pytest.mark.parametrize("recipe", ADAPTED + MIXTURES)
def test_a_recipe_with_adapters_trains(recipe: str, models: dict[str, str], tmp_path: Path) -> None:
    rows = unpaired_rows(4) if recipe.startswith("kto") else paired_rows(4)
    steps = two_steps(recipe, models, tmp_path, rows)
    assert len(steps) == 2 and all(math.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in steps)
    trained(tmp_path / "out", 4 if "qlora" in recipe else None, 4 if recipe in MIXTURES else 7)


def test_online_dpo_with_both_models_in_4_bits(models: dict[str, str], tmp_path: Path) -> None:
    prompts = [{"prompt": row["prompt"]} for row in unpaired_rows(4)]
    reward = ("--reward_model_path", models["reward"], "--max_new_tokens", "8")
    steps = two_steps("online_dpo_qlora_8b", models, tmp_path, prompts, *reward)
    assert len(steps) == 2 and all(math.isfinite(step["loss"]) for step in steps)
    assert any(step["objective/scores_margin"] > 0 for step in steps)
    trained(tmp_path / "out", 4)


@pytest.mark.filterwarnings("error:Already found a `peft_config`")
def test_sft_and_then_kto_on_its_adapter(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """KTO starts from the adapter of SFT, which is also its reference, and does not modify its folder."""
    rows = unpaired_rows(4)
    answers = [{"prompt": row["prompt"], "completion": row["completion"]} for row in rows]
    two_steps("sft_lora", models, tmp_path / "sft", answers)
    first = trained(tmp_path / "sft" / "out", None)
    adapter = ("--adapter_name_or_path", str(tmp_path / "sft" / "out"))
    two_steps("kto_after_sft", models, tmp_path / "kto", rows, *adapter)
    assert "reference: initial policy, adapter (a frozen copy of its adapters, no second model)" in (
        capsys.readouterr().out
    )
    second = trained(tmp_path / "kto" / "out", None)
    assert second.keys() == first.keys() and any(not torch.equal(second[name], first[name]) for name in first)
    unmoved = load_file(tmp_path / "sft" / "out" / "adapter_model.safetensors")
    assert all(torch.equal(unmoved[name], first[name]) for name in first)
