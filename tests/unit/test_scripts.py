"""What TRL scripts import in addition to configs and trainers: TRL's own, and functions for pairs."""

from __future__ import annotations

import importlib.metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from support.data_tokenizers import word_tokenizer
from support.helpers import tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import alignment
from alignment.checkpoint.saving import written_folder
from alignment.compat.trl.scripts import NAMES, RELEASES
from alignment.config.errors import DataError, OptionError
from alignment.online.arguments import is_of
from alignment.training.arguments import with_arguments

WORDS = "a b c"
with_trl = pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")


def fresh_model() -> Any:
    return AutoModelForCausalLM.from_config(tiny_config("tied"))


@pytest.mark.parametrize("found", [None, "0.23.1", "2.0.0"])
def test_without_a_supported_release_the_error_names_both(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    def version(name: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr("alignment.compat.trl.scripts.version", version)
    there = f"trl {found} is installed" if found else "it is not installed"
    for name in NAMES:
        with pytest.raises(ImportError, match=rf"^alignment.{name}: requires trl>=0.24,<2, and {there}; run pip"):
            getattr(alignment, name)
    with pytest.raises(AttributeError):
        alignment.ORPOTrainer  # noqa: B018


def test_the_extra_installs_a_supported_release() -> None:
    text = (Path(__file__).parents[2] / "setup.py").read_text(encoding="utf-8")
    assert f'"trl": ["trl{RELEASES}"' in text


@with_trl
def test_names_are_those_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    import trl

    assert alignment.ModelConfig is trl.ModelConfig and alignment.TrlParser is trl.TrlParser
    monkeypatch.setattr("alignment.compat.trl.scripts._PLACES", ())
    with pytest.raises(ImportError, match=r"^alignment.get_peft_config: trl .* has no such name"):
        alignment.get_peft_config  # noqa: B018


@with_trl
def test_further_arguments_next_to_options() -> None:
    parser = alignment.TrlParser((alignment.ScriptArguments, alignment.KTOConfig, alignment.ModelConfig))
    line = "--dataset_name d --model_name_or_path m --use_peft --output_dir o --use_cpu --bf16"
    script, options, model = parser.parse_args_and_config(line.split())
    assert (script.dataset_name, model.model_name_or_path, model.use_peft) == ("d", "m", True)
    assert (options.bf16, options.output_dir, options.use_peft, options.dataset_name) == (True, "o", False, None)
    assert parser.parse_args_and_config("--output_dir o --use_cpu --bf16 false".split())[1].bf16 is False


USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("assistant", "c"))
)


def test_the_common_prompt_of_pairs() -> None:
    pair = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    assert alignment.extract_prompt({"chosen": [USER, GOOD], "rejected": [USER, BAD]}) == pair
    for chosen, rejected, prompt in (
        ("It is blue", "It is red", "It is"),
        ("a rose", "a roses", "a"),  # no word is split
        ("yes", "yes, sir", ""),  # no completion becomes empty
    ):
        pair = {"prompt": prompt, "chosen": chosen[len(prompt) :], "rejected": rejected[len(prompt) :]}
        assert alignment.extract_prompt({"chosen": chosen, "rejected": rejected}) == pair
    with pytest.raises(DataError, match="identical"):
        alignment.extract_prompt({"chosen": "a", "rejected": "a"})


def test_pairs_become_labeled_rows() -> None:
    pairs = Dataset.from_dict({"prompt": ["p"], "chosen": ["a"], "rejected": ["b"], "id": [3]})
    rows = alignment.unpair_preference_dataset(pairs)
    assert [tuple(row[key] for key in ("prompt", "completion", "label", "id")) for row in rows] == [
        ("p", "a", True, 3),
        ("p", "b", False, 3),
    ]


def test_quantization_of_a_model_given_by_name(tmp_path: Path) -> None:
    weights = BitsAndBytesConfig(load_in_4bit=True)
    options = alignment.KTOConfig(output_dir=str(tmp_path), use_cpu=True, model_init_kwargs={"revision": "main"})
    changed = with_arguments(options, "model", weights)
    assert changed.model_init_kwargs == {"revision": "main", "quantization_config": weights}
    assert options.model_init_kwargs == {"revision": "main"} and with_arguments(options, "model", None) is options
    with pytest.raises(OptionError, match="also set in model_init_kwargs"):
        with_arguments(changed, "model", weights)
    with pytest.raises(OptionError, match="cannot be applied to a live model"):
        with_arguments(options, fresh_model(), weights)


def test_a_reward_model_loaded_from_its_option_is_recognized(tmp_path: Path) -> None:
    fresh_model().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert is_of(loaded, str(tmp_path)) and is_of(str(tmp_path), str(tmp_path))
    assert not is_of(loaded, "another") and not is_of(len, str(tmp_path)) and not is_of(None, None)


def test_a_tokenizer_loaded_with_the_models_keywords_can_be_saved(tmp_path: Path) -> None:
    word_tokenizer(WORDS).save_pretrained(tmp_path / "given")
    keywords = {"dtype": torch.float32, "quantization_config": None}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "given", padding_side="left", **keywords)
    with written_folder(tmp_path / "written", tokenizer):
        pass
    assert AutoTokenizer.from_pretrained(tmp_path / "written").padding_side == "left"
