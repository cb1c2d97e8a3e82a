"""Runs that change their model before training: additional tokens of a chat template, and merged adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from support.data_tokenizers import PLAIN, char_tokenizer
from support.helpers import STAGES, make_classifier, make_model, options, train_and_close, unpaired_rows
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from alignment import KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from alignment.checkpoint.export import export
from alignment.checkpoint.trained_model import find_model
from alignment.config.errors import ModelError
from alignment.config.options_export import ExportOptions

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("own_process_group")]
OPEN, END = "<|open|>", "<|close|>"
ROWS = [
    {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]}
    for text in ("ab", "cde", "fg", "hijk", "l", "mn", "opq", "rs")
]
REJECTED = {"role": "assistant", "content": "no"}
IDS = torch.arange(2, 26)[None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer whose template uses tokens that the models' tokenizers lack."""
    tokenizer = char_tokenizer(template=PLAIN)
    tokenizer.add_special_tokens({"additional_special_tokens": [OPEN, END]})
    tokenizer.eos_token = END
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{OPEN}{{{{ m['role'] }}}} {{{{ m['content'] }}}}{END}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{OPEN}assistant {{% endif %}}"
    )
    folder = tmp_path_factory.mktemp("source")
    tokenizer.save_pretrained(folder)
    return str(folder)


def run(model: Any, source: str, folder: Path, stage: str = "stage0", resume: Any = None, **more: Any) -> SFTTrainer:
    """Two windows, saved; the engines still exist."""
    plain = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "num_train_epochs": 1}
    given = {**options(folder), **plain, "deepspeed": STAGES[stage], "chat_template_path": source, **more}
    tokenizer = char_tokenizer(template=PLAIN)
    trainer = SFTTrainer(model, args=SFTConfig(**given), train_dataset=ROWS, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return trainer


def weights(folder: Path) -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_the_saved_model_is_the_same_at_every_stage(kind: str, source: str, tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", kind)
    live = AutoModelForCausalLM.from_pretrained(base)
    known = live.get_input_embeddings().num_embeddings
    first = run(base, source, tmp_path / "0")
    first.close()
    tokenizer = AutoTokenizer.from_pretrained(first.output_dir)
    saved = AutoModelForCausalLM.from_pretrained(first.output_dir)
    end = tokenizer.convert_tokens_to_ids(END)
    assert (tokenizer.eos_token, saved.config.eos_token_id) == (END, end) and end >= known
    assert saved.generation_config.eos_token_id == [end, 1], "the model's own end token ends texts as well"
    assert len(tokenizer) == saved.config.vocab_size == len(saved.get_input_embeddings().weight) == 128
    for stage, model in (("stage3", base), ("stage0", live), ("stage2-offload", base)):
        folder = tmp_path / f"{stage} {type(model).__name__}"
        run(model, source, folder, stage).close()
        for name, value in weights(folder / "out").items():
            torch.testing.assert_close(value, saved.state_dict()[name], rtol=0, atol=2e-6)


def test_a_run_resumes_with_them(source: str, tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", "untied")
    more = {"save_strategy": "steps", "save_steps": 1}
    whole = run(base, source, tmp_path, "stage3", **more)
    whole.close()
    expected = weights(whole.output_dir)
    checkpoint = whole.output_dir / "checkpoint-1"
    assert len(AutoTokenizer.from_pretrained(checkpoint)) == 128
    for file in whole.output_dir.glob("model*.safetensors"):
        file.unlink()
    again = run(base, source, tmp_path, "stage3", resume=str(checkpoint), **more)
    again.close()
    for name, value in weights(again.output_dir).items():
        assert torch.equal(value, expected[name]), name


def test_adapters_are_saved_with_the_new_rows(source: str, tmp_path: Path) -> None:
    """At both stages; PEFT loads them onto the base, which it extends by these rows, as do chat and the merge."""
    base = make_model(tmp_path / "base", "untied")
    outputs = []
    for stage in ("stage0", "stage3"):
        trainer = run(base, source, tmp_path / stage, stage, use_peft=True, lora_r=2)
        trainer.close()
        loaded = AutoPeftModelForCausalLM.from_pretrained(trainer.output_dir).eval()
        with torch.no_grad():
            outputs.append(loaded(input_ids=IDS).logits)
    chatting = find_model(str(trainer.output_dir), "RUN")
    with torch.no_grad():
        assert torch.equal(chatting.load(torch.device("cpu"))(input_ids=IDS).logits, outputs[-1])
    assert len(chatting.tokenizer()) == 128 and (start := chatting.start()) is not None
    assert start.config != chatting.config, "its embeddings have other rows, so chat loads it as well"
    assert outputs[0].shape[-1] == 128
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=2e-5)
    export(trainer.output_dir, tmp_path / "merged", ExportOptions(samples=0))
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(input_ids=IDS).logits
    torch.testing.assert_close(merged, outputs[1], rtol=0, atol=2e-5)


def test_reward_models_with_additional_tokens(source: str, tmp_path: Path) -> None:
    base = make_classifier(tmp_path / "base")
    given = {**options(tmp_path), "deepspeed": STAGES["stage3"], "chat_template_path": source}
    rows = [{"chosen": row["messages"], "rejected": [row["messages"][0], REJECTED]} for row in ROWS]
    trainer = RewardTrainer(
        base, args=RewardConfig(**given), train_dataset=rows, processing_class=char_tokenizer(template=PLAIN)
    )
    train_and_close(trainer, save=True)
    saved = AutoModelForSequenceClassification.from_pretrained(trainer.output_dir)
    assert len(AutoTokenizer.from_pretrained(trainer.output_dir)) == saved.config.vocab_size == 128


def test_adapters_with_a_peft_configuration_are_merged(tmp_path: Path) -> None:
    """The reference is the merged model: the first KTO loss is that of a policy that equals its reference."""
    base = make_model(tmp_path / "base", "untied")
    live = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM")
    )
    args = KTOConfig(**{**options(tmp_path), "learning_rate": 0.1, "optim": "sgd"})
    tokenizer = char_tokenizer(template=PLAIN)
    trainer = KTOTrainer(
        live, args=args, train_dataset=unpaired_rows(8), processing_class=tokenizer, peft_config=LoraConfig(r=4)
    )
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert losses[0] == pytest.approx(0.5, abs=2e-6) and abs(losses[1] - 0.5) > 1e-6
    trainer.save_model()
    trainer.close()
    with pytest.raises(ModelError, match="with other adapters merged into it"):
        export(trainer.output_dir, tmp_path / "merged", ExportOptions(samples=0))
