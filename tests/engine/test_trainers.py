"""Trainers with real engines in one process: references, life cycle, saving, logging, stopping."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import parameter_offload
from support.helpers import STAGES, make_model, options, paired_rows, train_and_close, unpaired_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

import alignment.methods.cpo
import alignment.methods.kto
from alignment import CPOConfig, CPOTrainer, DPOTrainer, KTOConfig, KTOTrainer
from alignment.config.errors import OptionError, TrainingError
from alignment.data.batching import Batch, MicroBatches, collate
from alignment.reporting.progress import Progress
from alignment.training import run_engines
from alignment.training.trainer import AlignmentTrainer


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_model(folder / name, "tied", seed) for seed, name in enumerate(("policy", "reference"), 1)}


def kto(paths: dict[str, str], folder: Path, rows: Any = 8, **more: Any) -> KTOTrainer:
    """A trainer with a reference of its own, and the given number of rows."""
    data = unpaired_rows(rows, seed=3) if isinstance(rows, int) else rows
    args = KTOConfig(**options(folder, **more))
    return KTOTrainer(paths["policy"], paths["reference"], args=args, train_dataset=data)


def cpo(paths: dict[str, str], folder: Path, rows: int = 8, evaluated: int = 0, **more: Any) -> CPOTrainer:
    """A trainer with these numbers of pairs to train on and to evaluate."""
    data = {"train_dataset": paired_rows(rows), "eval_dataset": paired_rows(evaluated) if evaluated else None}
    return CPOTrainer(paths["policy"], args=CPOConfig(**options(folder, **more)), **data)


def trained(trainer: AlignmentTrainer) -> list[dict[str, Any]]:
    """Train, close the trainer, and return what it logged with a loss."""
    return [entry for entry in train_and_close(trainer).state.log_history if "loss" in entry]


def losses(entries: list[dict[str, Any]]) -> list[float]:
    return [entry["loss"] for entry in entries]


def load(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def a_batch(path: str) -> Batch:
    tokenizer = AutoTokenizer.from_pretrained(path)
    return collate([(tokenizer("hello")["input_ids"], tokenizer(text)["input_ids"]) for text in ("there", "you")], 20)


def sums_of(model: Any, batch: Batch) -> torch.Tensor:
    """The log-probs of a batch's sequences by the library's model."""
    with torch.no_grad():
        logits = model(batch.inputs["input_ids"]).logits.log_softmax(-1).reshape(-1, model.config.vocab_size)
    return torch.zeros(2).index_add(0, batch.segments, logits[batch.positions, batch.targets])


def metrics_of(result: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in result.items() if not k.endswith(("runtime", "per_second"))}


def test_evaluation_does_not_depend_on_the_batch_size(paths: dict[str, str], tmp_path: Path) -> None:
    """25 rows: the last batch has one row for batch sizes 1, 3 and 8. Without training data."""
    for cls, rows in ((KTOTrainer, unpaired_rows(25, seed=3)), (CPOTrainer, paired_rows(25, seed=3))):
        reference = {"ref_model": paths["reference"]} if cls is KTOTrainer else {}
        found = []
        for batch in (1, 3, 8):
            args = cls.config_class(**options(tmp_path, per_device_eval_batch_size=batch))
            trainer = cls(paths["policy"], args=args, eval_dataset={"all": rows, "few": rows[:7]}, **reference)
            found.append(metrics_of(trainer.evaluate()))
            trainer.close()
        assert "eval_all_loss" in found[0] and "eval_few_rewards/margins" in found[0]
        assert cls is CPOTrainer or found[0]["eval_all_kl"] > 0.01
        for other in found[1:]:
            assert other == pytest.approx(found[0], rel=1e-5, abs=1e-5)
    assert not (tmp_path / "out").exists(), "evaluation writes nothing"


def test_a_negative_kl_is_clamped(paths: dict[str, str], tmp_path: Path) -> None:
    """Swapping policy and reference negates every log-ratio, and thus the estimate."""
    found = []
    for policy, reference in (("policy", "reference"), ("reference", "policy")):
        args = KTOConfig(**options(tmp_path))
        trainer = KTOTrainer(
            model=paths[policy], ref_model=paths[reference], args=args, eval_dataset=unpaired_rows(12, seed=3)
        )
        found.append(trainer.evaluate()["eval_kl"])
        trainer.close()
    assert min(found) == 0.0 and max(found) > 0.01


def test_no_sequence_is_longer_than_max_length(paths: dict[str, str], tmp_path: Path) -> None:
    """Not even a partner's completion after a row's prompt."""
    rows = [{"prompt": "a" * n, "completion": "b" * (20 - n), "label": n % 2 == 0} for n in range(2, 18)]
    args = KTOConfig(**options(tmp_path, max_length=24, per_device_train_batch_size=16))
    trainer = KTOTrainer(model=paths["policy"], args=args, train_dataset=rows)
    data, sampler = trainer.data.train, trainer.data.sampler
    (batch,) = MicroBatches(trainer.method.kind.collate, data.dataset, sampler.plan(0, 0), 0)
    whole = data.table.prompt + data.table.completions[:, 0]
    assert (
        whole.max() == batch.matched.inputs["input_ids"].shape[1] < 24 == batch.mismatched.inputs["input_ids"].shape[1]
    )


def test_log_probs_of_a_loss_of_means_are_per_token(paths: dict[str, str], tmp_path: Path) -> None:
    found = {}
    for loss_type in ("sigmoid", "simpo"):
        args = CPOConfig(**options(tmp_path, loss_type=loss_type, cpo_alpha=1.0 if loss_type == "sigmoid" else 0.0))
        trainer = CPOTrainer(model=paths["policy"], args=args, eval_dataset=paired_rows(1))
        found[loss_type] = trainer.evaluate()
        row = trainer.data.eval[""].dataset[0]
        trainer.close()
    assert found["simpo"]["eval_nll_loss"] == pytest.approx(found["sigmoid"]["eval_nll_loss"])  # whatever cpo_alpha
    for side in ("chosen", "rejected"):
        tokens = len(row[f"{side}_ids"])
        assert tokens > 1 and found["simpo"][f"eval_logps/{side}"] == pytest.approx(
            found["sigmoid"][f"eval_logps/{side}"] / tokens
        )


def test_evaluate_during_and_after_training(paths: dict[str, str], tmp_path: Path) -> None:
    trainer = cpo(paths, tmp_path, 12, 12, num_train_epochs=2, eval_strategy="epoch", eval_on_start=True)
    before = trainer.evaluate(metric_key_prefix="before")
    trainer.train()
    seen = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [entry["step"] for entry in seen] == [0, 3, 6]
    assert seen[0]["eval_loss"] == pytest.approx(before["before_loss"])
    after = trainer.evaluate()
    assert after["eval_loss"] == pytest.approx(seen[-1]["eval_loss"]) and after["eval_loss"] < before["before_loss"]
    trainer.close()
    for act in (trainer.evaluate, trainer.train, trainer.save_model):  # they would use the initial weights
        with pytest.raises(OptionError, match="create a new|call save_model before"):
            act()


@pytest.mark.parametrize("stage", ["stage0", pytest.param("stage2", marks=pytest.mark.ci), "stage3"])
def test_live_model_is_its_own_reference(paths: dict[str, str], tmp_path: Path, stage: str) -> None:
    """The reference is a copy of the given object, not loaded from its path, and does not follow the policy."""
    model = load(paths["policy"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    args = KTOConfig(**options(tmp_path, num_train_epochs=2, deepspeed=STAGES[stage], ref_placement="sharded"))
    tokenizer = AutoTokenizer.from_pretrained(paths["policy"])
    trainer = KTOTrainer(model, args=args, tokenizer=tokenizer, train_dataset=unpaired_rows(12))
    assert trainer.processing_class is tokenizer, "under its older name"
    trainer.engines.build(6)
    models = trainer.engines.models
    batch = a_batch(paths["policy"])
    start = models.reference.engine.forward(batch).scores.clone()
    with torch.no_grad():
        torch.testing.assert_close(models.policy.forward(batch).scores, start, rtol=1e-5, atol=1e-5)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(0.5, abs=1e-6)
    torch.testing.assert_close(models.reference.engine.forward(batch).scores, start, rtol=0, atol=0)
    with torch.no_grad():
        assert float((models.policy.forward(batch).scores - start).abs().min()) > 0.01
    trainer.close()


def test_a_reference_of_another_size_has_its_own_buffers(paths: dict[str, str], tmp_path: Path) -> None:
    """ "auto" depends on the width of the engine's model."""
    wide = AutoModelForCausalLM.from_pretrained(paths["policy"]).config
    wide.hidden_size, wide.intermediate_size = 64, 96
    AutoModelForCausalLM.from_config(wide).save_pretrained(tmp_path / "wide")

    def sizes(reference: Any) -> tuple[int, int]:
        plan = kto({**paths, "reference": reference}, tmp_path, ref_placement="sharded", deepspeed="zero3").planned
        both = (plan.engines.policy, plan.engines.reference.frozen.ds_config)
        policy, other = (config["zero_optimization"]["stage3_prefetch_bucket_size"] for config in both)
        return policy, other

    def layer(path: str) -> int:
        model = AutoModelForCausalLM.from_pretrained(path)
        return sum(parameter.numel() for parameter in model.model.layers[0].parameters())

    width = AutoModelForCausalLM.from_pretrained(paths["policy"]).config.hidden_size
    assert sizes(None) == (12 * width**2, layer(paths["policy"]))
    assert sizes(str(tmp_path / "wide")) == (12 * width**2, layer(str(tmp_path / "wide")))


@pytest.mark.parametrize("stage", ["stage2", "stage3-offload"])
def test_saved_folders_load_with_the_trained_weights(paths: dict[str, str], tmp_path: Path, stage: str) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    trainer = cpo(paths, tmp_path, 20, max_steps=5, deepspeed=STAGES[stage], **saving)
    output, folder = trainer.train(), trainer.output_dir
    batch = a_batch(paths["policy"])
    with torch.no_grad():
        expected = trainer.engines.models.policy.forward(batch).scores
    trainer.save_model()
    trainer.close()
    assert [p.name for p in sorted(folder.glob("checkpoint-*"))] == ["checkpoint-5"]
    assert not list(folder.glob(".*")), "no partial folder is left"
    assert len({(folder / name).stat().st_mode for name in ("config.json", "model.safetensors")}) == 1
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert again.dtype == torch.float32 and AutoTokenizer.from_pretrained(folder)("hello")["input_ids"]
    torch.testing.assert_close(sums_of(again, batch), expected, rtol=1e-5, atol=1e-5)
    assert AutoModelForCausalLM.from_pretrained(folder / "checkpoint-5") is not None
    for place in (folder, folder / "checkpoint-5"):
        assert json.loads((place / "trainer_state.json").read_text())["global_step"] == output.global_step == 5
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5]
    assert lines[0]["rows"] == 20 and lines[-1]["phases"]["train"]["entries"] == 5
    assert json.loads((folder / "options.json").read_text())["learning_rate"] == 1e-3
    assert json.loads((folder / "deepspeed.json").read_text())["gradient_clipping"] == 1.0


@pytest.mark.parametrize("stage", [pytest.param(s, marks=() if s == "stage3" else pytest.mark.ci) for s in STAGES])
def test_close_releases_every_engine(paths: dict[str, str], tmp_path: Path, stage: str) -> None:
    """Memory of weights, master weights and optimizer states of ten trainers must not add up."""
    placement = {"stage0": "replica", "stage2": "sharded"}.get(stage, "offload")
    trainer = kto(paths, tmp_path, max_steps=2, deepspeed=STAGES[stage], ref_placement=placement)
    trainer.train()
    engines = [trainer.engines.models.policy, trainer.engines.models.reference.engine]
    assert len(parameter_offload.FWD_MODULE_STACK) == sum(engine.partitioned for engine in engines)
    watched = [
        weakref.ref(thing) for engine in engines for thing in (engine.engine, engine.scorer, engine.scorer.model)
    ]
    del engines
    trainer.close()
    del trainer
    gc.collect()
    assert [watch() for watch in watched] == [None] * 6


def test_a_failed_start_leaves_nothing_behind(
    paths: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = load(paths["reference"])
    trainer = kto({**paths, "reference": reference}, tmp_path)

    def out_of_memory(*_: Any, **__: Any) -> None:
        assert not any(parameter.requires_grad for parameter in reference.parameters()), "it is built first"
        raise MemoryError("no memory for the policy")

    monkeypatch.setattr(run_engines, "build_engine", out_of_memory)
    with pytest.raises(MemoryError):
        trainer.train()
    assert all(parameter.requires_grad for parameter in reference.parameters())


def test_schedule_and_log_cadence(paths: dict[str, str], tmp_path: Path) -> None:
    schedule = {"num_train_epochs": 2.5, "lr_scheduler_type": "cosine", "warmup_ratio": 0.2}
    logging = {"logging_steps": 4, "logging_first_step": True}
    logging |= {"include_num_input_tokens_seen": True, "include_tokens_per_second": True}
    trainer = cpo(paths, tmp_path, 16, **schedule, **logging)
    output = trainer.train()
    trainer.close()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [1, 4, 8, 10] and output.global_step == 10
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=10)
    rates = []
    for _ in range(10):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert [entry["learning_rate"] for entry in logs] == pytest.approx([rates[i] for i in (0, 3, 7, 9)])
    assert logs[-1]["epoch"] == 2.5 and logs[-1]["num_tokens"] == trainer.state.num_input_tokens_seen > 0
    assert math.isfinite(output.training_loss)
    done = {"train_samples": 2.5 * 16, "train_steps": 10, "train_tokens": logs[-1]["num_tokens"]}
    for what, count in done.items():
        rate = output.metrics[f"{what}_per_second"]
        assert rate * output.metrics["train_runtime"] == pytest.approx(count), what


def test_the_mean_of_a_log_is_over_its_windows(paths: dict[str, str], tmp_path: Path) -> None:
    single, joint = (
        trained(kto(paths, tmp_path / str(every), 12, num_train_epochs=1, logging_steps=every, seed=3))
        for every in (1, 3)
    )
    assert len(single) == 3 and len(joint) == 1
    for name in ("loss", "kl"):
        assert joint[0][name] == pytest.approx(sum(entry[name] for entry in single) / 3, rel=1e-6)


def test_a_last_window_of_one_row_uses_no_kl(
    paths: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = kto(paths, tmp_path, 5, num_train_epochs=1)
    logs = trained(trainer)
    assert logs[0]["kl"] > 0 and logs[1]["kl"] == 0.0
    assert ("rewards/chosen" in logs[1]) != ("rewards/rejected" in logs[1]) and "rewards/margins" not in logs[1]
    assert trainer.state.log_history[-1]["windows_without_kl"] == 1
    assert "".join(capfd.readouterr()).count("a window with a single row") == 1


def test_apo_zero_needs_no_partners(paths: dict[str, str], tmp_path: Path) -> None:
    trainer = kto(paths, tmp_path, num_train_epochs=1, loss_type="apo_zero_unpaired")
    trained(trainer)
    assert "kl" not in trainer.phases.records and trainer.phases.records["reference"].entries == 2
    assert all("kl" not in entry for entry in trainer.state.log_history)


@pytest.mark.parametrize("stage", ["stage0", "stage2", "stage3-offload"])
def test_a_non_finite_loss_stops_before_the_update(
    paths: dict[str, str], tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = alignment.methods.kto.kto_loss, []

    def poisoned(policy_logps: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:  # the second micro-batch of the second window
            policy_logps = policy_logps * torch.tensor([1.0, float("nan")])
        return real(policy_logps, *args, **kwargs)

    monkeypatch.setattr(alignment.methods.kto, "kto_loss", poisoned)
    saving = {"save_strategy": "steps", "save_steps": 1}
    trainer = kto(paths, tmp_path, 12, num_train_epochs=1, deepspeed=STAGES[stage], **saving)
    plan = trainer.data.sampler.plan(0, 1)
    row = trainer.data.train.source_row(plan.micro_batches[1][0].rows[1])
    with pytest.raises(TrainingError, match=rf"nan.* non-finite loss: {row}\."):
        trainer.train()
    assert trainer.state.global_step == 1 and [entry["step"] for entry in trainer.state.log_history] == [1]
    trainer.save_model(tmp_path / "stopped")
    trainer.close()
    saved, stopped = load(str(tmp_path / "out" / "checkpoint-1")), load(str(tmp_path / "stopped"))
    for one, other in zip(saved.parameters(), stopped.parameters()):
        assert torch.equal(one, other)


@pytest.mark.parametrize("stage", [pytest.param("stage0", marks=pytest.mark.ci), "stage2", "stage3"])
def test_bf16_follows_fp32_and_keeps_fp32_masters(paths: dict[str, str], tmp_path: Path, stage: str) -> None:
    """With fp32 master weights, updates far below bf16's resolution are kept, and fp32 buffers stay fp32."""
    found = {}
    for bf16 in (False, True):
        trainer = cpo(paths, tmp_path / f"{bf16}", max_steps=2, bf16=bf16, deepspeed=STAGES[stage])
        trainer.train()
        found[bf16] = losses(trainer.state.log_history[:2])
        rotary = trainer.model.model.rotary_emb.inv_freq
        assert rotary.dtype == torch.float32
        torch.testing.assert_close(rotary, load(paths["policy"]).model.rotary_emb.inv_freq, rtol=0, atol=0)
        assert trainer.model.dtype == (torch.bfloat16 if bf16 else torch.float32)
        trainer.save_model(tmp_path / f"saved{bf16}")
        trainer.close()
    assert found[True] == pytest.approx(found[False], rel=0.03)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "savedTrue").dtype == torch.bfloat16


def test_worker_processes_change_nothing(paths: dict[str, str], tmp_path: Path) -> None:
    none, two = (
        losses(trained(cpo(paths, tmp_path / str(workers), 12, max_steps=3, dataloader_num_workers=workers)))
        for workers in (0, 2)
    )
    assert none == two


def test_a_users_optimizer_and_schedule(paths: dict[str, str], tmp_path: Path) -> None:
    """They take the same steps as the same optimizer selected by name."""
    found = []
    for own, named in ((True, {}), (False, {"optim": "sgd", "learning_rate": 0.5})):
        model = load(paths["policy"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        trainer = CPOTrainer(
            model=model,
            args=CPOConfig(**options(tmp_path / f"{own}", max_steps=2, deepspeed=STAGES["stage2"], **named)),
            processing_class=AutoTokenizer.from_pretrained(paths["policy"]),
            train_dataset=paired_rows(8),
            optimizers=(optimizer, schedule) if own else (None, None),
        )
        assert [entry["learning_rate"] for entry in trained(trainer)] == [0.5, 0.5]
        found.append(model.state_dict())
    # Parameter groups differ, and with them the addresses of the weights, which affect rounding.
    torch.testing.assert_close(*found)


def test_a_schedule_needs_its_optimizer(paths: dict[str, str], tmp_path: Path) -> None:
    model = load(paths["policy"])
    one, other = (torch.optim.SGD(model.parameters(), lr=0.5) for _ in range(2))
    schedule = torch.optim.lr_scheduler.ConstantLR(one, factor=1.0)
    for optimizers in ((None, schedule), (other, schedule)):
        with pytest.raises(OptionError, match="the scheduler belongs to a different optimizer"):
            args = CPOConfig(**options(tmp_path))
            CPOTrainer(model=model, args=args, optimizers=optimizers, train_dataset=paired_rows(4))


def test_a_non_finite_evaluation_does_not_stop_training(
    paths: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = cpo(paths, tmp_path, evaluated=4)
    monkeypatch.setattr(alignment.methods.cpo, "nll", lambda logps, lengths: (logps.sum() * math.nan, lengths.sum()))
    result = trainer.evaluate()
    assert math.isnan(result["eval_loss"]) and math.isfinite(result["eval_rewards/margins"])
    json.dumps(trainer.state.log_history, allow_nan=False)
    trainer.close()


def test_options_set_on_a_trainer_are_checked_when_it_trains(paths: dict[str, str], tmp_path: Path) -> None:
    trainer = cpo(paths, tmp_path)
    with pytest.raises(OptionError, match="^learning_rate='x'"):
        trainer.args.learning_rate = "x"  # type: ignore[assignment]
    trainer.args.load_best_model_at_end = True
    with pytest.raises(OptionError, match="^load_best_model_at_end=True"):
        trainer.train()
    assert trainer.args.metric_for_best_model == "loss" and trainer.args.greater_is_better is False
    trainer.args.learning_rate, trainer.args.eval_strategy = 0.1, "epoch"
    with pytest.raises(OptionError, match="^eval_strategy: epoch"):
        trainer.train()


def test_data_that_is_set_twice(paths: dict[str, str], tmp_path: Path) -> None:
    """In Python, an option that names data would have no effect: it is refused, or mentioned if data is missing."""
    for name, value in (("dataset_name", "nowhere.jsonl"), ("dataset_mixture", {"nowhere.jsonl": 1})):
        with pytest.raises(OptionError, match=f"^{name}=.*train_dataset is also passed"):
            cpo(paths, tmp_path, **{name: value})
        args = CPOConfig(**options(tmp_path, **{name: value}))
        with pytest.raises(OptionError, match="^`train_dataset` is required.*only the command line reads"):
            CPOTrainer(paths["policy"], args=args)
        with pytest.raises(OptionError, match="only the command line reads"):
            CPOTrainer(paths["policy"], args=args, eval_dataset=paired_rows(4)).train()


@pytest.mark.ci
@pytest.mark.parametrize("cls", [KTOTrainer, DPOTrainer])
def test_the_progress_bar_of_an_evaluation_completes(
    cls: type[Any], paths: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[tuple[int, int]] = []
    close = Progress.close

    def closed(bar: Progress) -> None:
        ends.append((bar._bar.n, bar._bar.total))
        close(bar)

    monkeypatch.setattr(Progress, "close", closed)
    rows = unpaired_rows(8) if cls is KTOTrainer else paired_rows(8)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    given = options(tmp_path, per_device_train_batch_size=2, disable_tqdm=False)
    with contextlib.closing(cls(paths["policy"], args=cls.config_class(**given), eval_dataset=rows)) as trainer:
        trainer.evaluate()
    assert [done for done, _ in ends] == [total for _, total in ends] and ends[0][0] >= 8
