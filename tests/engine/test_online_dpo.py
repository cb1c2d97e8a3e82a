"""Online DPO end to end: rollouts, rewards, judges, evaluation, tensors alive in each phase, output files."""

from __future__ import annotations

import gc
import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bad_online_commands import write_classifiers
from support.data_tokenizers import PLAIN, char_tokenizer
from support.helpers import STAGES, make_model, options, text, train_and_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Cache

from alignment import OnlineDPOConfig, OnlineDPOTrainer
from alignment.config.errors import OptionError, RewardError, TrainingError
from alignment.engines.scoring import FrozenEngine
from alignment.training import run_page
from alignment.training.run_page import draw_page


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    write_classifiers(folder)
    return {
        "policy": make_model(folder / "policy"),
        "reference": make_model(folder / "reference", seed=1),
        "classifier": str(folder / "classifier"),
    }


def prompts(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [{"prompt": text(rng, 2, 12), "wanted": rng.choice("abcde")} for _ in range(count)]


CONSTRUCTOR = (
    *("model", "args", "train_dataset", "eval_dataset", "processing_class", "ref_model", "judge"),
    *("reward_funcs", "reward_model", "reward_processing_class", "reward_processing_classes"),
)


def arguments(folder: Path, **more: Any) -> OnlineDPOConfig:
    given = {"max_new_tokens": 8, "max_steps": 2, **more}
    return OnlineDPOConfig(**{k: v for k, v in options(folder, **given).items() if k != "max_prompt_length"})


def online(paths: dict[str, str], folder: Path, rows: int = 4, **more: Any) -> OnlineDPOTrainer:
    """A trainer with this number of prompts; ``more`` are arguments of the constructor, and options."""
    given = {name: more.pop(name) for name in CONSTRUCTOR if name in more}
    return OnlineDPOTrainer(
        **{"model": paths["policy"], "args": arguments(folder, **more), "train_dataset": prompts(rows), **given}
    )


def letters(completions: list[str], wanted: list[str]) -> list[float]:
    """Count the letters from ``wanted`` to the end of the alphabet."""
    return [float(sum(letter >= one for letter in text)) for text, one in zip(completions, wanted, strict=True)]


def table(folder: Path) -> list[dict[str, Any]]:
    """The lines of the run's table of completions."""
    return [json.loads(line) for line in (folder / "out" / "completions.jsonl").read_text().splitlines()]


def logs(trainer: OnlineDPOTrainer) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "pairs/dropped" in entry]


def test_a_script_for_trl_runs(paths: dict[str, str], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(paths["policy"])
    ref_model = AutoModelForCausalLM.from_pretrained(paths["policy"])
    reward_model = AutoModelForSequenceClassification.from_pretrained(paths["classifier"], num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(paths["policy"])
    reward_tokenizer = AutoTokenizer.from_pretrained(paths["classifier"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    models = {"model": model, "ref_model": ref_model, "reward_model": reward_model}
    tokenizers = {"processing_class": tokenizer, "reward_processing_class": reward_tokenizer}
    trainer = OnlineDPOTrainer(args=arguments(tmp_path), train_dataset=prompts(8), **models, **tokenizers)
    assert trainer.train().global_step == 2 and trainer.reward_weights.tolist() == [1.0]
    first, second = logs(trainer)
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5) and first["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert abs(second["objective/kl"]) > 1e-3
    assert first["objective/scores"] == first["rewards/reward_model/mean"]
    assert first["objective/scores_margin"] > 0
    both = 2 * first["objective/scores"]  # two completions per prompt, so this is the mean over the pairs
    assert 2 * first["objective/rlhf_reward"] == pytest.approx(both, abs=1e-5) and first["pairs/dropped"] == 0
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    trainer.close()


def test_functions_weights_and_more_generations(paths: dict[str, str], tmp_path: Path) -> None:
    async def brevity(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        return [None if len(ids) == 8 else -float(len(ids)) for ids in completion_ids]

    given = {"num_generations": 4, "beta": [0.1, 0.3], "reward_weights": [1.0, 0.5], "missing_eos_penalty": 2.0}
    sources = {"ref_model": paths["reference"], "reward_funcs": [letters, brevity]}
    trainer = online(paths, tmp_path, **sources, **given)
    assert trainer.reward_weights.tolist() == [1.0, 0.5]
    train_and_close(trainer)
    first, second = logs(trainer)
    assert (first["beta"], second["beta"]) == (0.1, 0.3), "four prompts fill one window, so each step is an epoch"
    said = table(tmp_path)
    assert [line["step"] for line in said] == [1] * 4 + [2] * 4
    for line in said:
        assert line["dropped"] is not None or line["chosen_score"] > line["rejected_score"]
        assert {line["prompt"]} <= {row["prompt"] for row in prompts(4)}
    assert 0 < first["rewards/ignored"] < 1
    # The second function only scores completions that ended early, which have no penalty.
    ended = first["val/contain_eos_token"]
    short = (1 - 2 * first["rewards/ignored"]) * first["rewards/brevity/mean"] if ended else 0.0
    expected = first["rewards/letters/mean"] + 0.5 * short - 2.0 * (1 - ended)
    assert first["objective/scores"] == pytest.approx(expected)


def test_a_completion_ends_with_any_eos_of_tokenizer_and_model(paths: dict[str, str], tmp_path: Path) -> None:
    """Chat models often have two: the tokenizer's, and another one in the generation config."""
    model = AutoModelForCausalLM.from_pretrained(paths["policy"])
    own = AutoTokenizer.from_pretrained(paths["policy"])
    model.generation_config.eos_token_id = [token for token in range(len(own)) if token != own.eos_token_id]
    first = {"reward_funcs": lambda completion_ids: [float(ids[0]) for ids in completion_ids]}
    trainer = train_and_close(online(paths, tmp_path, model=model, processing_class=own, max_steps=1, **first))
    (log,) = logs(trainer)
    assert log["completions/mean_length"] == 1.0 == log["val/contain_eos_token"]


def test_a_judge_that_fails_and_prefers_a_position(paths: dict[str, str], tmp_path: Path) -> None:
    shown: list[list[str]] = []

    class First:
        def judge(self, prompts: list[str], pairs: list[list[str]]) -> list[int]:
            shown.extend(pairs)
            return [-1 if number == 0 else 0 for number in range(len(pairs))]

    trainer = train_and_close(online(paths, tmp_path, judge=First(), max_steps=1))
    (log,) = logs(trainer)
    assert log["pairs/failed"] == 0.25 == log["pairs/dropped"] and len(shown) == 4
    assert "objective/scores" not in log and "objective/rlhf_reward" not in log
    chosen = {line["chosen"] for line in table(tmp_path) if line["dropped"] is None}
    assert chosen == {pair[0] for pair in shown[1:]}, "those that the judge saw first and preferred"


@pytest.mark.parametrize("judged", [False, True])
def test_evaluation_computes_the_win_rate_against_the_initial_policy(
    paths: dict[str, str], tmp_path: Path, judged: bool
) -> None:
    """A policy trained strongly toward one letter wins; an untrained policy has no comparison."""

    def share(text: str) -> float:
        return sum(letter > "m" for letter in text) / max(len(text), 1)

    def late(completions: list[str], **columns: Any) -> list[float]:
        return [share(text) for text in completions]

    def later(prompts: list[str], pairs: list[list[str]]) -> list[int]:
        return [int(share(second) > share(first)) for first, second in pairs]

    source: dict[str, Any] = {"judge": later} if judged else {"reward_funcs": late}
    steps = {"max_steps": 8, "learning_rate": 3e-2, "eval_strategy": "steps", "eval_steps": 4, "logging_steps": 8}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "win_rate" if judged else "objective/scores"}
    given = {"per_device_train_batch_size": 8, "eval_dataset": prompts(24, seed=1), **steps, **best, **source}
    trainer = online(paths, tmp_path, 16, **given)
    trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 2 and evaluations[-1]["eval_win_rate"] > 0.7
    assert ("eval_objective/scores" in evaluations[-1]) is not judged
    assert {"eval_rewards/margins", "eval_completions/mean_length"} <= evaluations[-1].keys()
    entries = {name: record.entries for name, record in trainer.phases.records.items()}
    # The initial policy's completions and those of two evaluations, separate from the eight training steps.
    assert (entries["rollout"], entries["eval rollout"]) == (8, 3)
    assert (entries["reference"], entries["eval reference"], entries["evaluate"]) == (8, 2, 2)
    again = trainer.evaluate()
    same = [name for name in again if not name.endswith(("runtime", "per_second"))]
    assert {name: again[name] for name in same} == {name: evaluations[-1][name] for name in same}
    other = trainer.evaluate(prompts(4, seed=2))
    assert "eval_win_rate" not in other and "eval_loss" in other
    trainer.close()
    report = (tmp_path / "out" / "report.md").read_text()
    for phase in ("rollout", "score", "reference", "train", "step"):
        assert f"| {phase} " in report
    assert "generate, up to " in report


def test_a_window_without_pairs_advances_only_the_schedule(paths: dict[str, str], tmp_path: Path) -> None:
    """No weight decay and no momentum either; averages of the run exclude the window."""
    calls = iter(range(9))

    def silent_at_second(prompts: list[str], pairs: list[list[str]]) -> list[int]:
        call = next(calls)
        return [-1 if call == 1 else 0 for _ in pairs]

    given = {"max_steps": 4, "lr_scheduler_type": "linear", "weight_decay": 0.5, "learning_rate": 1e-2}
    given |= {"save_strategy": "steps", "save_steps": 1, "judge": silent_at_second}
    trainer = online(paths, tmp_path, 8, **given)
    output = trainer.train()
    trainer.close()
    found = logs(trainer)
    assert [entry["pairs/failed"] for entry in found] == [0.0, 1.0, 0.0, 0.0]
    assert [entry["learning_rate"] for entry in found] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])
    assert [entry["grad_norm"] == 0.0 for entry in found] == [False, True, False, False]
    folders = [tmp_path / "out" / f"checkpoint-{step}" for step in (1, 2, 3, 4)]
    weights = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders]
    same = [all(torch.equal(one[name], other[name]) for name in one) for one, other in zip(weights, weights[1:])]
    assert same == [True, False, False]
    assert output.metrics["windows_without_pairs"] == 1
    assert output.training_loss == pytest.approx(sum(entry["loss"] for entry in found if "loss" in entry) / 3)
    tokens = [entry["num_tokens"] for entry in found]
    assert tokens[0] == tokens[1] < tokens[2] < tokens[3] == trainer.phases.records["train"].tokens


def constant(completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def test_a_run_without_pairs_ends_with_an_error(
    paths: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And counts windows in a row across a resume; one with a pair starts the count again. The report says so."""
    monkeypatch.setattr(run_page, "draw_page", draw_page)  # not drawn in other tests: see conftest.py
    saved = {"save_strategy": "steps", "save_steps": 100, "max_steps": 9, "lr_scheduler_type": "constant"}

    def run(most: int | None, reward: Any, **more: Any) -> OnlineDPOTrainer:
        return online(paths, tmp_path, 8, reward_funcs=reward, max_windows_without_pairs=most, **saved | more)

    first = run(3, constant)
    with pytest.raises(TrainingError, match=r"^step 3: .*max_windows_without_pairs.* checkpoint-3$") as caught:
        train_and_close(first)
    assert "last 3 windows" in str(caught.value) and "4 prompts: 4 tied" in str(caught.value)
    out = "".join(capfd.readouterr())
    assert all(f"step {step}: " in out for step in (1, 2, 3)) and "(4 prompts: 4 tied); its update was skipped" in out
    folder = tmp_path / "out" / "checkpoint-3"
    again = run(4, constant)
    with pytest.raises(TrainingError, match="^step 4: .*last 4 windows"):
        train_and_close(again, resume_from_checkpoint=str(folder))
    calls = iter(range(99))

    def better_at_second(completions: list[str], **columns: Any) -> list[float]:
        return [sum(map(ord, text)) * float(call == 1) for call in [next(calls)] for text in completions]

    last = run(5, better_at_second, resume_anyway=True)  # another reward
    assert last.train(resume_from_checkpoint=str(folder)).metrics["windows_without_pairs"] == 3 + 1 + 4
    last.close()
    said = "8 of 9 windows had no pair to train on"
    report, page = ((tmp_path / "out" / name).read_text() for name in ("report.md", "report.html"))
    assert f"advice: {said}" in "".join(capfd.readouterr()) and said in page
    assert f"- {said}" in report and "were tied: " in report and "- Windows without pairs: 8\n" in report


def _alive() -> dict[str, int]:
    """Count the existing tensors with a graph, and caches."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        things = gc.get_objects()
        graphs = sum(isinstance(one, torch.Tensor) and one.grad_fn is not None for one in things)
        caches = sum(isinstance(one, Cache) for one in things)
    return {"graphs": graphs, "caches": caches}


@pytest.mark.parametrize("stage", ["stage0", "stage3"])
def test_score_and_reference_phases_hold_no_other_memory(
    paths: dict[str, str], tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored, referenced, original = [], [], FrozenEngine.forward
    gathered: list[int] = []

    def recorded(self: FrozenEngine, batch: Any, **how: Any) -> Any:
        referenced.append(_alive())
        return original(self, batch, **how)

    monkeypatch.setattr(FrozenEngine, "forward", recorded)

    def watching(completions: list[str], wanted: list[str]) -> list[float]:
        scored.append(_alive())
        policy = trainer.engines.window_pass.models.policy
        whole = [p for p in policy.scorer.parameters() if hasattr(p, "ds_id") and not p.ds_persist]
        gathered.append(sum(p.ds_status.name != "NOT_AVAILABLE" for p in whole))
        assert bool(whole) == (stage == "stage3")
        return letters(completions, wanted)

    trainer = online(paths, tmp_path, 8, reward_funcs=watching, deepspeed=STAGES[stage])
    _alive()
    train_and_close(trainer)
    assert len(scored) == 2 and len(referenced) == 4
    assert all(found == {"graphs": 0, "caches": 0} for found in scored + referenced)
    assert gathered == [0, 0]
    entries = {name: record.entries for name, record in trainer.phases.records.items()}
    assert entries == dict.fromkeys(("rollout", "score", "reference", "train", "step"), 2)


def test_contradicting_arguments_are_refused(paths: dict[str, str], tmp_path: Path) -> None:
    """Those that only Python can give; the others are in tests/support/bad_online_commands.py."""
    judge = {"judge": lambda prompts, pairs: [0]}
    for given, said in (
        ({}, "^reward_model: "),
        ({**judge, "reward_model": "nowhere"}, "^judge: cannot be combined with reward_model"),
        ({**judge, "reward_processing_class": object()}, "^judge: .*reward_processing_class"),
        ({"reward_funcs": lambda completions, answer: [0.0]}, "argument: 'answer'"),
        ({"judge": 3}, "judge"),
        ({"reward_funcs": letters, "args": arguments(tmp_path, reward_funcs="a.py:f")}, "reward_funcs: set both"),
        ({**judge, "missing_eos_penalty": 1.0}, "missing_eos_penalty=1.0: "),
    ):
        with pytest.raises(OptionError, match=said):
            online(paths, tmp_path, **given)


def test_weights_are_saved_if_a_reward_function_fails(paths: dict[str, str], tmp_path: Path) -> None:
    calls = iter(range(9))

    def failing(completions: list[str], wanted: list[str]) -> list[float]:
        if next(calls) == 2:
            raise RuntimeError("no answer")
        return letters(completions, wanted)

    saving = {"save_strategy": "steps", "save_steps": 100}
    trainer = online(paths, tmp_path, 8, reward_funcs=failing, max_steps=4, **saving)
    said = r"^step 3: .*RuntimeError: no answer.* The weights of step 2 are saved in checkpoint-2$"
    with pytest.raises(RewardError, match=said):
        trainer.train()
    assert (tmp_path / "out" / "checkpoint-2" / "model.safetensors").is_file()
    trainer.close()


def test_each_reward_model_has_its_own_tokenizer_and_engine(paths: dict[str, str], tmp_path: Path) -> None:
    reward = AutoModelForSequenceClassification.from_pretrained(paths["classifier"])
    policy = AutoModelForCausalLM.from_pretrained(paths["policy"])
    own = AutoTokenizer.from_pretrained(paths["classifier"])
    common: dict[str, Any] = {"model": policy, "processing_class": own}
    both = {"reward_funcs": [letters, reward]}
    trainer = online(paths, tmp_path, **common, **both, reward_processing_classes=[None, own])
    assert trainer.resources.classifiers[0].rows.tokenizer is own
    one: dict[str, Any] = {"reward_model": reward, "reward_processing_class": own}
    for given, said in (
        ({**both, "reward_processing_classes": [own]}, "^reward_processing_classes: 1 "),
        ({**both, "reward_processing_classes": [own, None]}, r"^reward_processing_classes\[0\]: "),
        ({"reward_funcs": letters, "reward_processing_class": own}, "^reward_processing_class: "),
        ({"reward_funcs": [reward, reward], "reward_processing_classes": [own, own]}, "already used"),
        ({**one, "reward_model": policy}, "already used"),
        ({**one, "reward_model": letters}, "pass functions as reward_funcs"),
        ({**one, "ds3_gather_for_generation": True}, "ds3_gather_for_generation=True: "),
    ):
        with pytest.raises(OptionError, match=said):
            online(paths, tmp_path, **common, **given)


def test_conversations_and_columns_reach_functions(paths: dict[str, str], tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def watching(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, **columns)
        return [float(number) for number in range(len(prompts))]

    rows = [{"prompt": [{"role": "user", "content": f"say {n}"}], "answer": [n], "tag": None} for n in range(4)]
    given = {"processing_class": char_tokenizer(template=PLAIN), "train_dataset": rows, "max_steps": 1}
    trainer = online(paths, tmp_path, reward_funcs=watching, **given)
    train_and_close(trainer)
    assert sorted(answer[0] for answer in seen["answer"]) == [0, 0, 1, 1, 2, 2, 3, 3] and seen["tag"] == [None] * 8
    for prompt, completion, answer in zip(seen["prompts"], seen["completions"], seen["answer"], strict=True):
        assert prompt == [{"role": "user", "content": f"say {answer[0]}"}]
        assert [message["role"] for message in completion] == ["assistant"]
    assert seen["completion_ids"] and seen["trainer_state"].max_steps == 1
    (log,) = logs(trainer)
    assert log["objective/scores_margin"] == 1.0, "the second of two completions scores one more"
