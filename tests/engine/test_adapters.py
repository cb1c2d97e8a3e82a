"""Adapters in a run: trained, saved for PEFT and for another run, restored, merged; for every supported type."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.data_tokenizers import PLAIN, char_tokenizer
from support.helpers import STAGES, make_model, options, paired_rows, train_and_close, unpaired_rows
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Qwen2Config

from alignment import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from alignment.config.errors import OptionError, OutputError
from alignment.models.adapters.injection import REFERENCE

pytestmark = pytest.mark.usefixtures("own_process_group")
IDS = torch.arange(2, 26)[None]
ROWS = unpaired_rows(6, seed=4)
RATE = 0.05


def run_options(folder: Path, **more: Any) -> dict[str, Any]:
    """Two windows, and steps large enough to be measured."""
    common = {"optim": "sgd", "learning_rate": RATE, "max_grad_norm": 0.0, "num_train_epochs": 1}
    return {**options(folder), **common, **more}


def trained(model: Any, folder: Path, config: Any = None, **more: Any) -> KTOTrainer:
    """A trainer that has trained and saved; its engines still exist."""
    args = KTOConfig(**run_options(folder, **more))
    tokenizer = char_tokenizer(template=PLAIN)
    trainer = KTOTrainer(model, args=args, train_dataset=ROWS, peft_config=config, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    return trainer


def logits(model: nn.Module) -> Tensor:
    """Logits of fixed tokens, without dropout."""
    model.eval()
    with torch.no_grad():
        return model(input_ids=IDS).logits


def inside(trainer: Any) -> Tensor:
    """Logits of the model in the engine."""
    return logits(trainer.engines.models.policy.scorer.model)


def losses(trainer: Any) -> list[float]:
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


KINDS = {
    "lora": LoraConfig(r=2),
    "dora": LoraConfig(r=2, use_dora=True),
    "rslora": LoraConfig(r=2, use_rslora=True, init_lora_weights="gaussian"),
    "random": LoraConfig(r=2, init_lora_weights=False),
    "head": LoraConfig(r=2, target_modules=["q_proj", "lm_head"]),
    "whole head": LoraConfig(r=2, modules_to_save=["lm_head"]),
    "ia3": peft.IA3Config(),
    "loha": peft.LoHaConfig(r=2),
    "lokr": peft.LoKrConfig(r=2),
    "oft": peft.OFTConfig(oft_block_size=8),
}
LONGER = {"dora", "rslora", "loha", "lokr", "oft"}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.ci) if kind in LONGER else kind for kind in KINDS]
)
def test_the_saved_adapters_are_the_trained_ones(kind: str, base: str, tmp_path: Path) -> None:
    """PEFT loads it onto the base. The reference is the initial policy: every loss of the first step is 0.5."""
    trainer = trained(base, tmp_path, KINDS[kind])
    found = inside(trainer)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), trainer.output_dir)
    torch.testing.assert_close(logits(loaded), found, rtol=0, atol=1e-5)
    assert float((found - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max()) > 1e-3, "it has trained"
    assert losses(trainer)[0] == pytest.approx(0.5, abs=2e-6) and abs(losses(trainer)[1] - 0.5) > 1e-6
    copied = any(REFERENCE in name for name, _ in trainer.engines.models.policy.scorer.named_parameters())  # type: ignore[union-attr]
    assert copied == (kind == "random"), "which changes the model before training"
    trainer.close()


def test_the_saved_folder(base: str, tmp_path: Path) -> None:
    """The adapter, the tokenizer, and a record of the base; no full model from before is left next to it."""
    (tmp_path / "out").mkdir()
    for name in ("config.json", "model.safetensors", "notes.txt"):
        (tmp_path / "out" / name).write_text("{}")
    trainer = trained(base, tmp_path, None, use_peft=True, lora_r=2, overwrite_output_dir=True, load_in_4bit=True)
    trainer.close()
    names = {file.name for file in trainer.output_dir.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "training_base.json", "tokenizer.json"} < names
    assert "notes.txt" in names and not names & {"config.json", "model.safetensors"}
    recorded = json.loads((trainer.output_dir / "training_base.json").read_text())
    assert (recorded["base_model"], recorded["task"], recorded["dtype"]) == (base, "causal_lm", "float32")
    assert recorded["quantization"]["bnb_4bit_quant_type"] == "nf4"
    config = json.loads((trainer.output_dir / "adapter_config.json").read_text())
    assert (config["task_type"], config["base_model_name_or_path"]) == ("CAUSAL_LM", base)
    assert AutoTokenizer.from_pretrained(trainer.output_dir).chat_template
    assert isinstance(peft.AutoPeftModelForCausalLM.from_pretrained(trainer.output_dir), PeftModel)


@pytest.mark.ci
@pytest.mark.parametrize("stage", ["stage0", "stage3"])
def test_training_continues_from_a_folder(stage: str, base: str, tmp_path: Path) -> None:
    """Adapters with nonzero A and B: the reference is a frozen copy of them, and equals a separate model."""
    first = trained(base, tmp_path / "first", LoraConfig(r=2))
    first.close()
    outcomes = []
    for placement in (None, "replica"):
        more = {"adapter_name_or_path": str(first.output_dir), "ref_placement": placement, "deepspeed": STAGES[stage]}
        second = trained(base, tmp_path / f"{placement}", **more)
        outcomes.append((losses(second), second.engines.plan.describe(second.engines._given)))
        second.close()
    assert outcomes[0][0] == pytest.approx(outcomes[1][0], abs=1e-6)
    assert outcomes[0][0][0] == pytest.approx(0.5, abs=1e-6)
    assert "a frozen copy of its adapters" in outcomes[0][1] and "replica" in outcomes[1][1]


def test_the_tokenizer_of_the_adapters_is_used(base: str, tmp_path: Path) -> None:
    """With the chat template of their training, which the base may lack."""
    first = trained(base, tmp_path / "first", LoraConfig(r=2))
    first.close()
    tokenizer = char_tokenizer(template=PLAIN + "!")
    tokenizer.save_pretrained(first.output_dir)
    args = KTOConfig(**run_options(tmp_path, adapter_name_or_path=str(first.output_dir)))
    second = KTOTrainer(base, args=args, train_dataset=ROWS)
    assert second.processing_class.chat_template == PLAIN + "!" != AutoTokenizer.from_pretrained(base).chat_template


@pytest.mark.ci
def test_two_live_adapters(base: str, tmp_path: Path) -> None:
    """One is trained against the other; with the same adapter in the reference's model, the run is the same."""
    first, second = (trained(base, tmp_path / name, LoraConfig(r=2), seed=n).output_dir for n, name in enumerate("ab"))

    def live() -> Any:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), first, adapter_name="one")
        model.load_adapter(second, adapter_name="two")
        return model

    other = live()
    other.set_adapter("two")
    here, there = (KTOConfig(**run_options(tmp_path / name)) for name in ("here", "there"))
    runs = [
        KTOTrainer(live(), args=here, train_dataset=ROWS, model_adapter_name="one", ref_adapter_name="two"),
        KTOTrainer(live(), other.merge_and_unload(), args=there, train_dataset=ROWS, model_adapter_name="one"),
    ]
    for run in runs:
        train_and_close(run)
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), abs=1e-6) and abs(losses(runs[0])[0] - 0.5) > 1e-5


def test_a_trained_bias_is_not_part_of_the_reference(tmp_path: Path) -> None:
    """The base then changes with the adapters: rejected with the policy's engine, exact with a separate one."""
    torch.manual_seed(0)
    folder = make_model(tmp_path / "llama", "untied")
    config = Qwen2Config(**{**AutoModelForCausalLM.from_pretrained(folder).config.to_dict(), "model_type": "qwen2"})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "qwen")
    model = str(tmp_path / "qwen")
    with pytest.raises(OptionError, match=r"q_proj.bias of the base model is also trained \(bias='all'\)"):
        trained(model, tmp_path / "own", LoraConfig(r=2, bias="all"))
    trainer = trained(model, tmp_path / "replica", LoraConfig(r=2, bias="all"), ref_placement="replica")
    found = inside(trainer)
    trainer.close()
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), trainer.output_dir)
    torch.testing.assert_close(logits(loaded), found, rtol=0, atol=1e-5)


@pytest.mark.ci
def test_packed_checkpoints_and_live_packed_models(base: str, tmp_path: Path) -> None:
    """They train as stored, and are repacked at stage 3: the same results as when packed on loading."""
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    packed = AutoModelForCausalLM.from_pretrained(base, quantization_config=config, device_map={"": "cpu"})
    packed.save_pretrained(tmp_path / "packed")
    char_tokenizer(template=PLAIN).save_pretrained(tmp_path / "packed")
    expected, found = None, {}
    for name, model, stage, more in (
        ("whole", base, "stage0", {"load_in_4bit": True}),
        ("stored", str(tmp_path / "packed"), "stage0", {}),
        ("stage 3", str(tmp_path / "packed"), "stage3", {}),
        ("live", packed, "stage3", {}),
        ("sharded", str(tmp_path / "packed"), "stage3", {"ref_placement": "sharded"}),
        ("copied", copy.deepcopy(packed), "stage0", {"ref_placement": "sharded"}),
    ):
        trainer = trained(model, tmp_path / name, LoraConfig(r=2), deepspeed=STAGES[stage], **more)
        found[name] = losses(trainer)
        trainer.close()
    expected = found.pop("whole")
    assert found == {name: pytest.approx(expected, abs=1e-6) for name in found}


def test_evaluation_before_training(base: str, tmp_path: Path) -> None:
    """Evaluation engines are followed by training engines with the same new adapters."""
    args = KTOConfig(**run_options(tmp_path, use_peft=True, lora_r=2, lora_dropout=0.0))
    trainer = KTOTrainer(base, args=args, train_dataset=ROWS, eval_dataset=ROWS)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(0.5, abs=1e-6)
    live = AutoModelForCausalLM.from_pretrained(base)
    args = KTOConfig(**run_options(tmp_path / "live"))
    config = LoraConfig(r=2, lora_alpha=32)
    other = KTOTrainer(live, args=args, train_dataset=ROWS, eval_dataset=ROWS, peft_config=config)
    assert other.evaluate()["eval_loss"] == pytest.approx(0.5, abs=1e-6)
    for each in (trainer, other):
        train_and_close(each)
    assert losses(trainer) == pytest.approx(losses(other), abs=1e-6)


def test_a_merged_folder_after_training(base: str, tmp_path: Path) -> None:
    """Also when the same command is restarted, as after a kill at the very end."""
    merged = {"merged_output_dir": str(tmp_path / "merged"), "resume_from_checkpoint": "latest"}
    for _ in range(2):
        trainer = trained(base, tmp_path, None, use_peft=True, lora_r=2, save_strategy="epoch", **merged)
        found = inside(trainer)
        trainer.close()
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(logits(whole), found, rtol=0, atol=1e-5)
    assert (tmp_path / "previous-1" / "merged" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("origin", "disabled"), [("new", True), ("new", False), ("folder", True), ("live", True), ("live", False)]
)
def test_dropout_of_adapters(base: str, tmp_path: Path, origin: str, disabled: bool) -> None:
    """disable_dropout includes new and given adapters: the policy equals its reference in the first window."""
    model: Any = base
    more: dict[str, Any] = {"use_peft": True, "lora_r": 2, "lora_dropout": 0.1} if origin == "new" else {}
    if origin != "new":
        config = LoraConfig(r=2, lora_dropout=0.1, init_lora_weights=False)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    if origin == "folder":
        model.save_pretrained(tmp_path / "adapter")
        model, more = base, {"adapter_name_or_path": str(tmp_path / "adapter")}
    args = DPOConfig(**run_options(tmp_path, max_steps=1, disable_dropout=disabled, **more))
    tokenizer = char_tokenizer(template=PLAIN)
    trainer = DPOTrainer(model, args=args, train_dataset=paired_rows(4), processing_class=tokenizer)
    trainer.train()
    first = next(record for record in trainer.state.log_history if "loss" in record)
    noise = {first[f"rewards/{name}"] for name in ("chosen", "rejected", "margins")}
    rates = {
        part.p
        for name, module in trainer.engines.policy.scorer.model.named_modules()
        if ".lora_dropout" in name
        for part in module.modules()
        if isinstance(part, nn.Dropout) and "reference" not in name
    }
    trainer.close()
    assert (noise == {0.0}) is (disabled or origin == "new")  # new adapters have no effect yet
    assert rates == {0.0 if disabled else 0.1}


def test_two_references_are_rejected(base: str, tmp_path: Path) -> None:
    def packed(reference: Any = None, **more: Any) -> list[bool]:
        args = DPOConfig(**run_options(tmp_path, use_peft=True, **more))
        plan: Any = DPOTrainer(base, reference, args=args, train_dataset=paired_rows(2)).planned.engines
        return [source.quantization is not None for source in (plan.source, plan.reference.source)]

    for said, reference, more in (
        ("ref_placement='adapter' and a reference model", base, {}),
        ("ref_deepspeed=.*has no effect with ref_placement='adapter'", None, {"ref_deepspeed": "ref_replica"}),
        ("ref_load_in_4bit=True: has no effect with ref_placement='adapter'", None, {"ref_load_in_4bit": True}),
    ):
        with pytest.raises(OptionError, match=said):
            packed(reference, ref_placement="adapter", **more)
    kwargs = {"quantization_config": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}}
    assert packed(model_init_kwargs=kwargs, ref_load_in_4bit=False) == [True, False]
    own = {"load_in_4bit": True, "ref_placement": "replica"}
    assert packed(**own) == [True, True] and packed(base, **own) == [True, False], "as the policy, if it is that"
    with pytest.raises(OptionError, match="adapters that do not exist yet"):
        model = AutoModelForCausalLM.from_pretrained(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        args = DPOConfig(**run_options(tmp_path, use_peft=True))
        DPOTrainer(model, args=args, train_dataset=paired_rows(2), optimizers=(optimizer, None))


@pytest.mark.ci
def test_a_second_round_at_stage_3_has_its_own_reference(base: str, tmp_path: Path) -> None:
    """The weights of a live model stay partitioned after a run; the next run's reference is its present policy."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, init_lora_weights=False))
    for number in range(2):
        trainer = trained(model, tmp_path / str(number), deepspeed=STAGES["stage3"])
        assert losses(trainer)[0] == pytest.approx(0.5, abs=1e-6)
        trainer.close()
    assert list(model.peft_config) == ["default"], "the copy is no part of what the user saves"


def test_resized_embeddings_are_saved(base: str, tmp_path: Path) -> None:
    """Also for a plain live model with new adapters."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(model.config.vocab_size + 3)
    trainer = trained(model, tmp_path, LoraConfig(r=2))
    found = inside(trainer)
    trainer.close()
    names = set(peft.load_peft_weights(str(trainer.output_dir), device="cpu"))
    assert {f"base_model.model.{name}.weight" for name in ("model.embed_tokens", "lm_head")} <= names
    plain = AutoModelForCausalLM.from_pretrained(base)
    plain.resize_token_embeddings(plain.config.vocab_size + 3)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(plain, trainer.output_dir)), found, rtol=0, atol=1e-5)


def test_options_that_would_be_lost_or_ignored_are_rejected(base: str, tmp_path: Path) -> None:
    def refused(said: str, model: Any = base, config: Any = None, **more: Any) -> None:
        with pytest.raises(OptionError, match=said):
            trained(model, tmp_path / "x", config, **more)

    inner = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2))
    refused(r"already contains adapters \(default\)", inner.get_base_model(), LoraConfig(r=2))
    with pytest.raises(OutputError, match="output_dir"):
        trained(base, tmp_path / "x", use_peft=True, output_dir=base, overwrite_output_dir=True)
    refused("a separate folder", use_peft=True, merged_output_dir=str(tmp_path / "x" / "out"))
    cached = {"merged_output_dir": "m", "model_init_kwargs": {"cache_dir": "c"}}
    refused("merging does not support cache_dir", use_peft=True, **cached)
    refused("lora_r=64: has no effect with peft_config", config=LoraConfig(r=2), use_peft=True, lora_r=64)
    inner.get_base_model().model.norm.weight.requires_grad_(True)
    refused("model.norm.weight requires a gradient but does not belong", inner)
