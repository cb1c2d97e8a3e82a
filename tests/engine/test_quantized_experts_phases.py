"""What surrounds training with quantized experts: references, rollouts, saved adapters, exports, resumed runs."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from support.adapter_grid import adapter_run
from support.allocations import Allocations, library
from support.drivers.rollout import PROMPTS, below_the_likeliest, policy_engine, sampling
from support.helpers import options, train_and_close, unpaired_rows
from support.oracle.adapters import adapted, dense_base
from support.split_results import assert_logged
from support.tiny_experts import make_experts
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import alignment
from alignment import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from alignment.checkpoint.export import ExportOptions, export
from alignment.checkpoint.trained_model import find_model
from alignment.config.errors import OptionError
from alignment.data.batching import MicroBatches
from alignment.models import experts
from alignment.models.adapters.injection import inject
from alignment.models.adapters.record import Adapters
from alignment.models.experts import packed_experts
from alignment.models.quantized import quantized
from alignment.models.source import model_source
from alignment.rollout.backend import RolloutRequest
from alignment.rollout.engine import RolloutEngine
from tools.chaos.__main__ import Chaos
from tools.chaos.plan import POINTS, Chain, Kill
from tools.chaos.world import World
from tools.ranks import RankServer
from tools.trial import workspace

pytestmark = pytest.mark.usefixtures("own_process_group")
QLORA: dict[str, Any] = {"use_peft": True, "load_in_4bit": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_experts(tmp_path_factory.mktemp("experts") / "model", "qwen3_moe")


def logps(model: Any) -> Tensor:
    """Return (2, 24, V) log-probs."""
    with torch.no_grad():
        return model(input_ids=torch.arange(48).view(2, 24) * 7 % 66, use_cache=False).logits.double().log_softmax(-1)


def gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


# References, the balancing loss, rollouts ---------------------------------------------------------------------------


@pytest.mark.ci
def test_every_reference_has_quantized_experts(path: str, tmp_path: Path) -> None:
    """The policy without adapters, a second model in 4 bits and stored log-probs give the same steps."""
    case = {"method": "DPO", "kind": "qlora", "stage": "stage2", "ranks": 1, "start": "new"}
    case |= {"checkpointing": "unchecked", "architecture": "qwen3_moe"}
    logs = []
    for placement in ("adapter", "replica", "precomputed"):
        run = adapter_run(case, {"qwen3_moe": path}, tmp_path, tmp_path)
        run["args"] |= {"ref_placement": placement, "output_dir": str(tmp_path / placement)}
        trainer = DPOTrainer(model=path, args=DPOConfig(**run["args"]), train_dataset=run["train"])
        log = train_and_close(trainer).state.log_history
        logs.append([entry for entry in log if "grad_norm" in entry])
    for other in logs[1:]:
        for number, (one, two) in enumerate(zip(logs[0], other, strict=True), 1):
            assert_logged(one, two, 1e-6, f"step {number}")
    assert abs(logs[0][-1]["rewards/chosen"]) > 0.01


def test_a_sharded_reference_is_refused(path: str, tmp_path: Path) -> None:
    args = KTOConfig(**options(tmp_path, **QLORA, ref_placement="sharded"))
    with pytest.raises(OptionError, match="ZeRO stage 3.*replica"):
        KTOTrainer(model=path, args=args, train_dataset=unpaired_rows(4))


def test_the_balancing_loss_is_that_of_dequantized_experts(path: str, tmp_path: Path) -> None:
    more = {"router_aux_loss_coef": 0.5, "model_init_kwargs": {"output_router_logits": True}}
    args = KTOConfig(**options(tmp_path, **QLORA, max_steps=1, gradient_checkpointing=True, **more))
    trainer = KTOTrainer(model=path, args=args, train_dataset=unpaired_rows(4))
    data, model, losses, tokens = trainer.data.train, dense_base(path, False, 4), [], []
    for batch in MicroBatches(trainer.method.kind.collate, data.dataset, trainer.data.sampler.plan(0, 0), 0):
        inputs = trainer.method.scored(batch).inputs
        output = model(**inputs, output_router_logits=True)
        loss = load_balancing_loss_func(output.router_logits, 6, 2, inputs["attention_mask"])
        losses.append(float(loss.detach()))
        tokens.append(int(inputs["attention_mask"].sum()))
    log = train_and_close(trainer).state.log_history[0]
    expected = sum(loss * count for loss, count in zip(losses, tokens)) / sum(tokens)
    assert log["aux_loss"] == pytest.approx(expected, rel=1e-5)


def random_adapters(model: PreTrainedModel, ds_config: dict[str, Any]) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    inject(model, Adapters(config), ds_config=ds_config, dtype=torch.float32, seed=3)


@pytest.fixture(scope="module")
def policy(path: str, own_process_group: None) -> Iterator[Any]:
    args = KTOConfig("out", **QLORA)
    source = model_source(path, "model_name_or_path", args)
    plan = quantized(source, args, key=path, in_4bit=True, compute=torch.float32, stage=2).quantization
    made = policy_engine(path, "stage2", random_adapters, quantization=plan, device=CPU)
    yield made
    made.close()


def test_rollouts_are_those_of_the_policy(policy: Any) -> None:
    """The tokens of greedy completions are the likeliest of the model that is trained."""
    assert packed_experts(policy.scorer.model)
    request = RolloutRequest(PROMPTS, 2, sampling(max_new_tokens=12, top_k=1), 1)
    with pytest.raises(OptionError, match="continuous.*quantized experts"):
        RolloutEngine(policy, "continuous", longest_context=64).generate(request)
    answers = RolloutEngine(policy, "auto", longest_context=64).generate(request)
    with policy.inference():
        for prompt, completions in zip(PROMPTS, answers, strict=True):
            assert max(below_the_likeliest(policy, prompt, one.ids) for one in completions) <= 1e-4


# Saved adapters and checkpoints -------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """The output folder of a run of 4 steps, which saved at step 2, and the policy's log-probs at its end."""

    folder: Path
    logps: Tensor


def trainer_of(path: str, folder: Path, **more: Any) -> KTOTrainer:
    given = {**QLORA, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.02, **more}
    return KTOTrainer(model=path, args=KTOConfig(**options(folder, **given)), train_dataset=unpaired_rows(16, 3))


@pytest.fixture(scope="module")
def trained(path: str, own_process_group: None, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    trainer = trainer_of(path, tmp_path_factory.mktemp("trained"))
    with contextlib.closing(trainer):
        trainer.train()
        trainer.save_model()
        return Trained(trainer.output_dir, logps(trainer.engines.policy.scorer.model.eval()))


def plain(path: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def test_checkpoints_hold_no_base_weights(path: str, trained: Trained) -> None:
    base = (Path(path) / "model.safetensors").stat().st_size
    for folder in (trained.folder, trained.folder / "checkpoint-2"):
        with safe_open(folder / "adapter_model.safetensors", "pt") as opened:
            assert all(".lora_" in name for name in opened.keys())
        assert not list(folder.glob("model*.safetensors"))
    assert sum(file.stat().st_size for file in (trained.folder / "checkpoint-2").rglob("*")) < base / 4


def test_adapters_compute_the_same_on_every_base(path: str, trained: Trained) -> None:
    """On quantized experts as in training; on dequantized and on original ones as PEFT loads them."""
    found = find_model(str(trained.folder), "model").load(CPU)
    assert packed_experts(found) and gap(logps(found), trained.logps) < 1e-6
    assert gap(logps(adapted(dense_base(path, False, 4), trained.folder)), trained.logps) < 1e-5
    with_peft = logps(PeftModel.from_pretrained(plain(path), trained.folder))
    by_hand, saved = plain(path), load_file(trained.folder / "adapter_model.safetensors")
    for name, first in saved.items():
        if "lora_A" in name:
            layer = by_hand.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            layer.weight.data += 8 / 4 * saved[name.replace("lora_A", "lora_B")] @ first
    assert gap(with_peft, logps(by_hand)) < 1e-5
    assert gap(with_peft, trained.logps) > 1e-2 < gap(with_peft, logps(plain(path))), "both have an effect"


def test_a_resumed_run_is_bitwise_equal(path: str, trained: Trained, tmp_path: Path) -> None:
    trainer = trainer_of(path, tmp_path)
    train_and_close(trainer, save=True, resume_from_checkpoint=str(trained.folder / "checkpoint-2"))
    one, other = (folder / "adapter_model.safetensors" for folder in (trained.folder, trainer.output_dir))
    assert one.read_bytes() == other.read_bytes()


class Mixture(World):
    """Runs with quantized experts."""

    def arguments(self, method: str, output_dir: Path, **changes: object) -> list[str]:
        """Return the arguments of ``launch/train.py``."""
        return super().arguments(method, output_dir, use_peft=True, load_in_4bit=True, **changes)


@pytest.mark.faults
def test_killed_ranks_resume_as_if_nothing_had_happened(ranks: RankServer) -> None:
    points = ("after a rank's state is written", "within an evaluation")
    kills = tuple(Kill(POINTS[point].ranks[-1], point) for point in points)
    with workspace("experts-") as folder:
        chaos = Chaos(ranks, folder)
        make_experts(folder / "world" / "policy", "qwen3_moe")
        chaos.world = Mixture(folder / "world")
        attempts = list(chaos.run(Chain("experts", "kto", kills)))
    assert not [attempt.said for attempt in attempts if attempt.problems]
    assert [attempt.killed for attempt in attempts] == [True, True, False]


@pytest.mark.ci
@pytest.mark.parametrize("skipped", [False, True])
def test_samples_are_those_of_the_experts_of_training(
    path: str, tmp_path: Path, ranks: RankServer, skipped: bool
) -> None:
    trainer = trainer_of(path, tmp_path, max_steps=1, save_strategy="no", bnb_4bit_skip_experts=skipped)
    train_and_close(trainer, save=True)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc"}\n')
    given = ("--prompts", "prompts.jsonl", "-n", 1, "--as", "completions", "--use_cpu", "--max_length", 64)
    command = (trainer.output_dir, *given, "--max_new_tokens", 8)
    done = ranks.run(Path(alignment.__file__).parents[1] / "launch" / "sample.py", *command, nproc=1, cwd=tmp_path)
    assert ("except experts" if skipped else "of which experts take") in done.stdout


# Exports ------------------------------------------------------------------------------------------------------------


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_an_export_has_the_experts_of_training(path: str, trained: Trained, tmp_path: Path) -> None:
    before = digest(Path(path) / "model.safetensors")
    report = export(trained.folder, tmp_path / "out", ExportOptions(samples=2))
    assert report.dequantized and report.error_max is not None and report.error_max < 1e-6
    exported = plain(str(tmp_path / "out"))
    assert gap(logps(exported), trained.logps) < 1e-5
    assert digest(Path(path) / "model.safetensors") == before, "experts are rounded in the memory of the file"
    given = ExportOptions(samples=0, load_in_4bit=True)  # as is known without it
    export(trained.folder, tmp_path / "given", given)
    assert gap(logps(plain(str(tmp_path / "given"))), logps(exported)) == 0


@pytest.mark.ci
def test_skipped_experts_are_exported_as_they_were(path: str, tmp_path: Path) -> None:
    trainer = trainer_of(path, tmp_path, max_steps=1, save_strategy="no", bnb_4bit_skip_experts=True)
    train_and_close(trainer, save=True)
    export(trainer.output_dir, tmp_path / "exported", ExportOptions(samples=0))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    exported, base = (plain(str(folder)).get_parameter(name) for folder in (tmp_path / "exported", path))
    assert torch.equal(exported, base)


@pytest.mark.ci
def test_an_export_never_holds_experts_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64 experts per layer, it needs the model, and a layer in fp32 when its log-probs are compared."""
    layer = 64 * 3 * 64 * 64 * 2
    monkeypatch.setattr(experts, "EXPERT_BYTES", layer // 24)  # bitsandbytes needs 7 times as much on a CPU
    base = make_experts(tmp_path / "base", "qwen3_moe", num_experts=64, num_hidden_layers=6)
    trainer = trainer_of(base, tmp_path, max_steps=1, save_strategy="no", bf16=True)
    train_and_close(trainer, save=True)
    with Allocations(library()).active() as allocations:
        allocations.begin()
        with allocations.phase("export"):
            export(trainer.output_dir, tmp_path / "exported", ExportOptions(samples=2, max_shard_size="1600KB"))
    files = [*(tmp_path / "exported").glob("*.safetensors")]
    size = sum(file.stat().st_size for file in files)
    assert len(files) > 5 and 6 * layer < size < 7 * layer
    assert size < allocations.peaks["export"] < size + 2.5 * layer
    saved = {name for file in files for name in safe_open(file, "pt").keys()}
    assert "model.layers.5.mlp.experts.63.gate_proj.weight" in saved
