"""The placement of frozen models on GPUs: chosen from the memory plan, the same on every rank and in every attempt."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import make_classifier, make_model, options, zero
from transformers import AutoModelForCausalLM, LlamaConfig

import alignment
from alignment.config import dtypes
from alignment.config.errors import OptionError
from alignment.models.adapters import skeleton
from alignment.models.source import ModelSource, model_source
from alignment.online.resources import OnlineResources
from alignment.planning import engines, placing
from alignment.planning.placing import Cards
from alignment.planning.plan import Frozen, NotPlanned
from alignment.planning.planner import Planner
from alignment.planning.weights import weights_of
from alignment.run.ranks import world_size
from tools.architectures.tiny import tiny_config

pytestmark = pytest.mark.usefixtures("own_process_group")
OFFLOAD = zero(3, optimizer=True, parameters=True)
OFFLOAD["zero_optimization"]["stage3_max_live_parameters"] = 10**7


def source(hidden: int, layers: int, inner: int, vocabulary: int, groups: int = 4, **more: Any) -> ModelSource:
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64 // groups}
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner, "vocab_size": vocabulary}
    return ModelSource("model", None, LlamaConfig(max_position_embeddings=8192, **sizes, **heads, **more), {})


HALF = source(896, 24, 4864, 151936, 7, tie_word_embeddings=True)  # 0.5B
EIGHT = source(4096, 32, 14336, 128256)  # 8B
WIDE = source(2048, 4, 8192, 512)  # 0.25B, almost all of it in its layers


@functools.cache
def counted(name: str, cls: Any = alignment.KTOConfig, **more: Any) -> Planner:
    """Return the planner of a policy, whose passes are counted once."""
    if cls is alignment.KTOConfig:
        more |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    args = cls("out", bf16=True, use_cpu=True, max_length=1024, **more)
    plan = engines.plan_engines(args, globals()[name], None)
    return Planner(args, replace(plan, reference=None), 1, card=0)


def planner(name: str, config: dict[str, Any], ranks: int = 1, **more: Any) -> Planner:
    """Return the planner of a policy with this DeepSpeed JSON."""
    base = counted(name, **more)
    return replace(base, engines=replace(base.engines, policy=config), ranks=ranks)


def placed(cards: Cards, model: ModelSource, **more: Any) -> str:
    choice = cards.place(model, **more)
    assert choice is not None
    return choice.placement


@pytest.mark.parametrize(
    ("policy", "config", "ranks", "reference", "card", "placement"),
    [
        ("HALF", zero(2), 1, HALF, 24, "replica"),
        ("HALF", zero(2), 1, EIGHT, 24, "offload"),
        ("HALF", zero(2), 4, EIGHT, 24, "replica"),
        ("HALF", zero(2), 4, EIGHT, 16, "sharded"),
        ("HALF", zero(3), 4, EIGHT, 16, "sharded"),
        ("EIGHT", OFFLOAD, 1, EIGHT, 24, "replica"),
        ("EIGHT", OFFLOAD, 1, EIGHT, 16, "offload"),
        ("EIGHT", OFFLOAD, 2, EIGHT, 16, "sharded"),
        ("EIGHT", zero(2), 1, HALF, 80, "offload"),  # the policy itself does not fit
    ],
)
def test_the_fastest_placement_that_fits(
    policy: str, config: dict[str, Any], ranks: int, reference: ModelSource, card: float, placement: str
) -> None:
    assert placed(Cards(planner(policy, config, ranks), card * 1e9), reference) == placement


@pytest.mark.parametrize(("ranks", "otherwise"), [(1, "offload"), (2, "sharded")])
def test_a_model_is_placed_where_the_plan_of_the_run_fits(ranks: int, otherwise: str) -> None:
    alone = planner("WIDE", zero(2), ranks)
    model = Frozen("reference", WIDE, "replica", "reference")
    plan = replace(alone, rewards=(model,)).plan()
    least = plan.peak(reserve=True)
    assert plan.fits(least + 1) and placed(Cards(alone, least + 2), WIDE) == "replica"
    assert not plan.fits(least - 1) and placed(Cards(alone, least - 1), WIDE) == otherwise


def test_the_peak_while_a_policy_is_loaded_counts() -> None:
    """Quantized weights are not partitioned while they are read; the others are."""
    sharded = {"zero_optimization": zero(3)["zero_optimization"] | {"stage3_max_live_parameters": 10**7}}
    adapters = {"load_in_4bit": True, "use_peft": True, "max_length": 64, "per_device_train_batch_size": 1}
    args = alignment.CPOConfig("out", bf16=True, use_cpu=True, deepspeed=sharded, **adapters)
    plan = Planner(args, engines.plan_engines(args, WIDE, None), 8, card=0)
    peaks = {phase: plan.plan().peak(phase, reserve=True) for phase in plan.plan().gpu}
    assert peaks["load"] > 1.05 * max(size for phase, size in peaks.items() if phase != "load")
    size = 1.05 * weights_of(WIDE, torch.bfloat16).base
    assert placed(Cards(plan, peaks["load"] + size + 10), WIDE) == "replica"
    assert placed(Cards(plan, peaks["load"] + size - 10), WIDE) == "sharded"


def test_placed_models_reduce_the_memory_for_the_next() -> None:
    """A model that is released before training only needs memory for itself."""
    alone = planner("WIDE", zero(2))
    size = weights_of(WIDE, torch.bfloat16).base
    cards = Cards(alone, alone.plan().peak(reserve=True) + 1.05 * 1.5 * size)
    assert placed(cards, WIDE, alone=True) == "replica"
    assert [placed(cards, WIDE) for _ in range(3)] == ["replica", "offload", "offload"]
    full = Cards(alone, alone.plan().peak(reserve=True) + 100)
    assert placed(full, WIDE, alone=True) == "replica" and placed(full, WIDE) == "offload"
    assert placed(full, EIGHT, alone=True) == "offload"


def test_models_placed_by_the_user_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, size = planner("WIDE", zero(2), 2), weights_of(WIDE, torch.bfloat16).base
    for placement, taken in (("replica", size), ("sharded", size / 2), ("offload", 0)):
        cards = Cards(alone, 24e9)
        cards.take(WIDE, placement)
        assert f"in addition to {(alone.plan().peak() + taken) / 1e9:.1f} GB" in cards.place(WIDE).why
    monkeypatch.setattr(engines, "smallest_card", lambda: 24e9)
    model = model_source(make_model(tmp_path / "model"), "model_name_or_path", counted("WIDE").options)
    others = []
    for asked in ({"ref_placement": "replica"}, {"ref_deepspeed": "ref_replica"}, {"ref_placement": "offload"}):
        args = alignment.KTOConfig(**options(tmp_path, deepspeed=zero(2), **asked))
        others.append(engines.plan_engines(args, model, model).cards._taken)
    assert others[0] == others[1] == others[2] + weights_of(model, torch.float32).base


def test_memory_is_kept_for_rollouts() -> None:
    """For KV caches, and for weights that are gathered if they fit."""
    kwargs = {"cls": alignment.OnlineDPOConfig, "per_device_train_batch_size": 1, "max_new_tokens": 64}
    by_layer = planner("WIDE", OFFLOAD, ds3_gather_for_generation=False, **kwargs)
    size = weights_of(WIDE, torch.bfloat16).base
    small = source(512, 4, 1024, 512)
    plan = planner("WIDE", OFFLOAD, **kwargs).plan()
    other = max(plan.peak(phase) for phase in plan.gpu if phase != "rollout")
    assert plan.peak("rollout") > other and by_layer.plan().peak() == other
    # Beside gathered weights, a model as large as the policy has no room; if they do not fit, they are not gathered.
    card = (other + 1.2 * size) * 1.05 / 0.9
    assert placed(Cards(by_layer, card), WIDE) == "replica"
    assert placed(Cards(planner("WIDE", OFFLOAD, **kwargs), card), WIDE) == "offload"
    tight = (plan.peak("rollout") - 1) * 1.05 / 0.9
    assert placed(Cards(planner("WIDE", OFFLOAD, **kwargs), tight), small) == "replica"
    # A tenth of the card is left for KV caches.
    exact = (other + size) * 1.05
    assert placed(Cards(by_layer, exact / 0.91), WIDE) == "offload"
    assert placed(Cards(by_layer, exact / 0.89), WIDE) == "replica"


@pytest.mark.parametrize(("card", "expected"), [(24e9, "replica"), (0.1e9, "offload")])
def test_a_run_reports_the_placement_of_its_reference(
    card: float, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "smallest_card", lambda: card)
    args = alignment.KTOConfig(**options(tmp_path, deepspeed=zero(2)))
    model = model_source(make_model(tmp_path / "model"), "model_name_or_path", args)
    reference = engines.plan_engines(args, model, model).reference
    assert reference is not None and reference.frozen.placement.name == expected
    said = reference.describe(None)
    assert f"{expected} (" in said and f"GB {'fit' if expected == 'replica' else 'do not fit'} in addition to" in said
    asked = replace(args, ref_placement="sharded", output_dir=str(tmp_path / "asked"))
    assert "by size" not in engines.plan_engines(asked, model, model).reference.describe(None)
    monkeypatch.undo()
    plain = engines.plan_engines(args, model, model).reference
    assert plain.frozen.placement.name == "replica" and "by size" not in plain.describe(None)


def test_memory_is_planned_for_the_longest_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for all 96 positions of the model: prompts have up to 20 tokens, completions up to 11."""
    rows = [{"prompt": "x" * size, "completion": "y" * (21 - size), "label": size == 20} for size in (20, 11)]
    monkeypatch.setattr(engines, "smallest_card", lambda: 24e9)
    args = alignment.KTOConfig(**options(tmp_path, deepspeed=zero(2), max_length=None))
    path = make_model(tmp_path / "model")
    trainer = alignment.KTOTrainer(path, args=args, train_dataset=rows)
    trainer.close()
    cards = trainer.planned.engines.cards
    assert cards.tokens == 31 and cards.planner.sequences == 1
    model = model_source(path, "model_name_or_path", args)
    unknown = engines.plan_engines(args, model, model).cards
    assert cards.planner.plan(31).peak() < cards._taken < unknown._taken
    assert cards._taken - cards.planner.plan(31).peak() == weights_of(model, torch.float32).base


@pytest.mark.parametrize(("pack", "least"), [(True, 33), (False, 62)])
def test_a_token_budget_is_checked_against_the_largest_row(tmp_path: Path, pack: bool, least: int) -> None:
    """The chosen completion and the rejected one follow the same prompt."""
    path = make_model(tmp_path / "model")
    rows = [{"prompt": "x" * size, "chosen": "y" * 10, "rejected": "c"} for size in (20, 9)]
    refused = pytest.raises(OptionError, match=f"max_tokens_per_batch={least - 1}: .* at least {least}")
    for budget in (least - 1, least):
        args = alignment.CPOConfig(**options(tmp_path, max_length=None, max_tokens_per_batch=budget, pack=pack))
        with refused if budget < least else nullcontext():
            alignment.CPOTrainer(path, args=args, train_dataset=rows).close()


def test_the_smallest_gpu_of_all_ranks_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 24 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5)
    other = 11e9
    monkeypatch.setattr(placing, "largest_numbers", lambda values: [max(values[0], -other)])
    assert placing.smallest_card() == other
    other = 30e9
    assert placing.smallest_card() == 12e9, "no more than its process may take"


def test_parameters_are_counted_without_loading_weights(tmp_path: Path) -> None:
    args = alignment.KTOConfig(**options(tmp_path))
    path = make_model(tmp_path / "model", "untied", layers=3)
    found = weights_of(model_source(path, "model_name_or_path", args), torch.bfloat16)
    live = AutoModelForCausalLM.from_pretrained(path)
    assert found is not None and found.numel == sum(p.numel() for p in live.parameters())
    assert (found.layers, found.base, found.widest) == (3, 2 * found.numel, 77 * 32)
    assert 3 * found.layer + 2 * 77 * 32 + 32 == found.numel
    assert weights_of(model_source(live, "model_name_or_path", args), torch.bfloat16) == found
    both = weights_of(ModelSource("gemma", None, tiny_config("gemma3"), {}), torch.bfloat16)
    assert both.layers == tiny_config("gemma3").text_config.num_hidden_layers, "not those of its image encoder"


def test_a_model_of_unknown_size_is_placed_in_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a reference, or beside a policy of unknown size; a GPU's default."""
    cards = Cards(planner("WIDE", zero(2)), 24e9)
    monkeypatch.setattr(skeleton, "skeleton", lambda *_, **__: (_ for _ in ()).throw(ImportError("timm")))
    assert cards.place(HALF) is None and cards.place(HALF, alone=True) is None
    taken = cards._taken
    cards.take(HALF, "replica")
    assert cards._taken == taken
    with pytest.raises(NotPlanned, match="the decoder layers of model cannot be counted"):
        Cards(replace(cards.planner), 24e9)
    monkeypatch.setattr(engines, "smallest_card", lambda: 24e9)
    monkeypatch.setattr("alignment.engines.placement.uses_cuda", lambda options: True)
    args = alignment.KTOConfig(**options(tmp_path, deepspeed=zero(2)))
    plan = engines.plan_engines(args, HALF, HALF)
    assert plan.cards is None and plan.reference.frozen.placement.name == "offload"


def test_a_plan_for_another_machine_does_not_use_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(engines, "world_size", lambda: 16)
    args = alignment.KTOConfig(**options(tmp_path, deepspeed=zero(2), bf16=None, use_cpu=False))
    model = model_source(make_model(tmp_path / "model"), "model_name_or_path", args)
    with dtypes.planning_for(dtypes.Machine(16, cuda=True)):
        assert placing.smallest_card() is None and world_size() == 16
        reference = engines.plan_engines(args, model, model).reference
    assert reference is not None and "unless it fits on the GPUs of the run" in reference.describe(None)


def test_placement_of_a_reward_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reward = make_model(tmp_path / "model"), make_classifier(tmp_path / "reward")
    prompts = [{"prompt": "abc"}, {"prompt": "de"}]
    taken = []
    for card, asked, expected in ((24e9, None, "replica"), (24e9, "replica", "replica"), (0.1e9, None, "offload")):
        monkeypatch.setattr(engines, "smallest_card", lambda card=card: card)
        limits = {"max_length": 64, "max_new_tokens": 8, "reward_placement": asked}
        args = alignment.OnlineDPOConfig(str(tmp_path / "out"), use_cpu=True, deepspeed=zero(2), **limits)
        trainer = alignment.OnlineDPOTrainer(model, reward_model=reward, args=args, train_dataset=prompts)
        assert isinstance(trainer.resources, OnlineResources)
        (found,) = trainer.resources.frozen
        assert (found.placement, found.phase, found.rows) == (expected, "score", 2 * args.per_device_train_batch_size)
        said = trainer.resources.classifiers[0].describe()
        assert asked or f"GB {'fit' if expected == 'replica' else 'do not fit'} in addition to" in said
        taken.append(trainer.planned.engines.cards._taken)
        trainer.close()
    sizes = [weights_of(one, torch.float32).base for one in (trainer.planned.policy, found.source)]
    assert taken[0] == taken[1] == taken[2] + sum(sizes)
