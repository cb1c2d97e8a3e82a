"""The placement of frozen models on GPUs: chosen from sizes, the same on every rank and in every attempt."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import make_classifier, make_model, options, zero
from transformers import AutoModelForCausalLM

import alignment
from alignment.config import dtypes
from alignment.config.dtypes import DtypePlan
from alignment.config.errors import OptionError
from alignment.config.options import AlignmentConfig
from alignment.models.partitioning import decoder_layers
from alignment.models.source import ModelSource, model_source
from alignment.models.tasks import CAUSAL_LM, CLASSIFIER
from alignment.online.resources import OnlineResources
from alignment.planning import engines, memory
from alignment.planning.memory import Cards, Census, Use, bytes_of, census, use_of_policy
from alignment.run.ranks import world_size
from tools.architectures.tiny import tiny_config

pytestmark = pytest.mark.usefixtures("own_process_group")
HALF = Census(494_000_000, 14_900_000, 24, 896, 4864, 32768, linear=357_000_000, widest=136_000_000)
EIGHT = Census(8_030_000_000, 218_000_000, 32, 4096, 14336, 131072, linear=6_980_000_000, widest=525_000_000)
SEVENTY = Census(70_600_000_000, 856_000_000, 80, 8192, 28672, 8192, 68_500_000_000, 1_050_000_000)
BF16 = DtypePlan("bfloat16", "float32", "bfloat16", accumulation_is_free=True)
FP32 = DtypePlan("float32", "float32", "float32")
CARD = 24e9


def given(folder: Path, **more: Any) -> AlignmentConfig:
    return alignment.KTOConfig(**options(folder, **{"max_length": 1024, **more}))


def placed(
    folder: Path, policy: Census, reference: Census, ranks: int = 1, *, config: dict[str, Any], card: float = CARD
) -> str:
    args = given(folder)
    use = use_of_policy(args, policy, config, BF16, ranks=ranks)
    return Cards(args, use, 2, ranks, card).chosen(reference).placement


def test_the_fastest_placement_that_fits(tmp_path: Path) -> None:
    full, offload = zero(2), zero(3, optimizer=True, parameters=True)
    assert placed(tmp_path, HALF, HALF, config=full) == "replica"
    assert placed(tmp_path, HALF, EIGHT, config=full) == "offload"
    assert placed(tmp_path, HALF, EIGHT, ranks=4, config=full) == "sharded"
    assert placed(tmp_path, EIGHT, EIGHT, config=offload) == "offload"
    assert placed(tmp_path, EIGHT, EIGHT, ranks=2, config=offload) == "sharded"
    assert placed(tmp_path, EIGHT, EIGHT, config=offload, card=80e9) == "replica"
    assert placed(tmp_path, EIGHT, EIGHT, config=full, card=80e9) == "offload", "the policy itself does not fit"


# Policy, ZeRO, ranks, further options or arguments; gigabytes of weights and optimizer states, activations, loading.
# The first row has 22 bytes per parameter: bf16 weights, AdamW with fp32 master weights, gradients and a flat copy.
USES: list[tuple[Census, dict[str, Any], int, dict[str, Any], tuple[float, float, float]]] = [
    (HALF, zero(2), 1, {}, (10.868, 1.247, 1.26)),
    (HALF, zero(2), 4, {}, (3.458, 1.247, 1.26)),
    (HALF, zero(1), 4, {}, (4.693, 1.247, 1.26)),
    (HALF, zero(0), 1, {"dtypes": FP32}, (9.88, 1.689, 2.52)),
    (HALF, zero(2), 1, {"dtypes": FP32}, (11.856, 1.689, 2.52)),
    (HALF, zero(2, optimizer=True), 1, {}, (0.988, 1.247, 1.26)),
    (HALF, zero(2, optimizer=True), 1, {"dtypes": replace(BF16, accumulate="float32")}, (2.964, 1.247, 1.26)),
    (HALF, zero(3), 4, {}, (3.078, 1.247, 0)),
    (HALF, zero(3, optimizer=True, parameters=True), 2, {}, (0.361, 1.247, 0)),
    (HALF, zero(2), 1, {"gradient_checkpointing": False}, (10.868, 7.451, 1.26)),
    # QLoRA of Llama 8B with r = 16 and a row of 1024 tokens peaks at 7.7 GB (calculated).
    (EIGHT, zero(2), 1, {"bits": 4, "trained": 42_000_000, "per_device_train_batch_size": 1}, (7.212, 1.82, 7.338)),
    (EIGHT, zero(2), 1, {"bits": 8, "trained": 42_000_000, "per_device_train_batch_size": 1}, (10.702, 1.82, 10.828)),
    # Quantized weights are not partitioned while they are read.
    (SEVENTY, zero(3), 8, {"bits": 4, "trained": 207_000_000}, (13.468, 8.087, 47.4)),
    (SEVENTY, zero(2), 8, {"trained": 207_000_000}, (142.131, 8.087, 143.3)),
    (SEVENTY, zero(3), 8, {"trained": 207_000_000}, (25.455, 8.087, 0)),
]


@pytest.mark.parametrize(("policy", "config", "ranks", "more", "expected"), USES)
def test_memory_of_training(
    policy: Census, config: dict[str, Any], ranks: int, more: dict[str, Any], expected: Any, tmp_path: Path
) -> None:
    arguments = {name: more[name] for name in ("bits", "trained") if name in more}
    args = given(tmp_path, **{k: v for k, v in more.items() if k not in ("bits", "trained", "dtypes")})
    use = use_of_policy(args, policy, config, more.get("dtypes", BF16), ranks=ranks, **arguments)
    assert tuple(round(part / 1e9, 3) for part in (use.weights, use.work, use.loading)) == expected


def test_the_peak_while_a_policy_is_loaded_counts(tmp_path: Path) -> None:
    """70B in 4 bits takes 40 GB on each of 8 GPUs before it is partitioned."""
    use = use_of_policy(given(tmp_path), SEVENTY, zero(3), BF16, ranks=8, bits=4, trained=207_000_000)
    for one, placement in ((use, "sharded"), (replace(use, loading=0.0), "replica")):
        assert Cards(given(tmp_path), one, 2, 8, 80e9).chosen(EIGHT).placement == placement


@pytest.mark.parametrize(
    ("ranks", "spare", "placement"), [(1, 0, "replica"), (1, -1, "offload"), (2, 0, "replica"), (2, -1, "sharded")]
)
def test_a_model_that_fits_exactly(
    ranks: int, spare: int, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_LEFT", 0.5)
    monkeypatch.setattr(memory, "_CONTEXT", 64)
    card = 2 * (64 + 1000 + 200 + 2 * 4096 + spare)
    cards = Cards(given(tmp_path), Use(1000, 200, gathered=1.0), 2, ranks, card)
    assert cards.chosen(Census(4096, 0, 0, 1, 1, 1)).placement == placement


@pytest.mark.parametrize(("gathered", "counted"), [(256, True), (257, False)])
def test_weights_are_gathered_if_they_take_half_of_the_gpu(
    gathered: float, counted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More is never gathered, and takes no memory."""
    monkeypatch.setattr(memory, "_GATHERED", 0.5)
    monkeypatch.setattr(memory, "_CONTEXT", 512)
    assert Cards(given(tmp_path), Use(8, 100, gathered), 2, 1, 1024)._trained == 8 + (256 if counted else 100)


def test_more_memory_is_reserved_for_rollouts(tmp_path: Path) -> None:
    online = alignment.OnlineDPOConfig(output_dir=str(tmp_path))
    just = Census(6_250_000_000, 0, 0, 1, 1, 1)
    assert Cards(given(tmp_path), Use(0, 0), 2, 1, 20e9).chosen(just).placement == "replica"
    assert Cards(online, Use(0, 0), 2, 1, 20e9).chosen(just).placement == "offload"


def test_placed_models_reduce_the_memory_for_the_next(tmp_path: Path) -> None:
    """The second replica has less memory; a model that is released before training takes none."""
    cards, model = Cards(given(tmp_path), Use(2e9, 0), 2, 1, CARD), Census(4_000_000_000, 0, 0, 1, 1, 1)
    assert cards.chosen(model, alone=True).placement == "replica"
    assert [cards.chosen(model).placement for _ in range(2)] == ["replica", "offload"]
    assert cards.chosen(model, bits=4).placement == "offload", "nothing of it is a linear layer"
    packed = replace(model, linear=model.parameters)
    assert cards.chosen(packed, bits=4).placement == "replica", "2.4 GB still fit"
    assert cards.chosen(Census(7_000_000_000, 0, 0, 1, 1, 1), alone=True).placement == "replica"


def test_models_placed_by_the_user_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "census", lambda source: source)
    for placement, others in (("replica", 8e9), ("sharded", 4e9 + 2 * 1e6), ("offload", 2 * 1e6)):
        cards = Cards(given(tmp_path), Use(2e9, 0), 2, 2, CARD)
        source = Census(4_000_000_000, 0, 0, 1, 1, 1, widest=10**6)
        cards.take(source, None, placement)  # type: ignore[arg-type]
        assert f"in addition to {(2e9 + others) / 1e9:.1f} GB" in cards.chosen(source).why
    args = given(tmp_path, deepspeed=zero(2), max_length=64, ref_placement="replica")
    model = model_source(make_model(tmp_path / "model"), "model_name_or_path", args)
    monkeypatch.undo()
    monkeypatch.setattr(engines, "smallest_card", lambda: CARD)
    asked = engines.plan_engines(args, model, model).cards
    args = replace(args, ref_placement=None, ref_deepspeed="ref_replica")
    assert asked is not None and asked._taken == engines.plan_engines(args, model, model).cards._taken > 0


def test_memory_is_reserved_for_weights_gathered_for_a_rollout(tmp_path: Path) -> None:
    """A frozen model in host memory costs less time than gathering weights for every token."""
    three = replace(EIGHT, parameters=3_000_000_000)
    reward = Census(3_500_000_000, 0, 0, 1, 1, 1)

    def beside(size: Census, **more: Any) -> str:
        online = alignment.OnlineDPOConfig(str(tmp_path), max_length=1024, per_device_train_batch_size=1, **more)
        use = use_of_policy(online, size, zero(3, optimizer=True, parameters=True), BF16, ranks=1)
        return Cards(online, use, 2, 1, CARD).chosen(reward).placement

    assert beside(three) == "offload" and beside(three, ds3_gather_for_generation=False) == "replica"
    assert beside(replace(EIGHT, parameters=14_000_000_000)) == "replica", "these are never gathered"


@pytest.mark.parametrize(("card", "expected"), [(24e9, "replica"), (1e9, "offload")])
def test_a_run_reports_the_placement_of_its_reference(
    card: float, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "smallest_card", lambda: card)
    args = given(tmp_path, deepspeed=zero(2), max_length=64)
    model = model_source(make_model(tmp_path / "model"), "model_name_or_path", args)
    reference = engines.plan_engines(args, model, model).reference
    assert reference is not None and reference.frozen.placement.name == expected
    said = reference.describe(None)
    assert f"{expected} (" in said and f"GB {'fit' if expected == 'replica' else 'do not fit'} in addition to" in said
    asked = given(tmp_path, deepspeed=zero(2), max_length=64, ref_placement="sharded")
    assert "by size" not in engines.plan_engines(asked, model, model).reference.describe(None)
    monkeypatch.undo()
    plain = engines.plan_engines(args, model, model).reference
    assert plain.frozen.placement.name == "replica" and "by size" not in plain.describe(None)


def test_memory_is_planned_for_the_longest_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for all 96 positions of the model: prompts have up to 20 tokens, completions up to 11."""
    rows = [{"prompt": "x" * size, "completion": "y" * (21 - size), "label": size == 20} for size in (20, 11)]
    path, card = make_model(tmp_path / "model"), CARD
    args = given(tmp_path / "out", deepspeed=zero(2), max_length=None)
    model = model_source(path, "model_name_or_path", args)
    monkeypatch.setattr(engines, "smallest_card", lambda: card)

    def planned() -> tuple[float, str]:
        trainer = alignment.KTOTrainer(path, args=args, train_dataset=rows)
        trainer.close()
        plan = trainer.planned.engines
        return plan.cards._trained, plan.reference.frozen.placement.name

    unknown = engines.plan_engines(args, model, model)
    size = census(model)
    use = use_of_policy(args, size, unknown.policy, unknown.dtypes, ranks=1, longest=31)
    assert planned() == (use.weights + use.work, "replica")
    assert use.weights + use.work < unknown.cards._trained
    middle = (use.weights + use.work + unknown.cards._trained) / 2
    card = (middle + 1e9 + bytes_of(size, 4, None)) / 0.7
    assert planned()[1] == "replica"
    assert engines.plan_engines(args, model, model).reference.frozen.placement.name == "offload"


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
    monkeypatch.setattr(memory, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 24 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5)
    other = 11e9
    monkeypatch.setattr(memory, "largest_numbers", lambda values: [max(values[0], -other)])
    assert memory.smallest_card() == other
    other = 30e9
    assert memory.smallest_card() == 12e9, "no more than its process may take"


def test_parameters_are_counted_without_loading_weights(tmp_path: Path) -> None:
    args = given(tmp_path)
    path = make_model(tmp_path / "model", "untied", layers=3)
    found = census(model_source(path, "model_name_or_path", args))
    live = AutoModelForCausalLM.from_pretrained(path)
    assert found is not None and found.parameters == sum(p.numel() for p in live.parameters())
    assert (found.layers, found.hidden, found.inner, found.positions) == (3, 32, 48, 96)
    assert 3 * found.layer + 2 * 77 * 32 + 32 == found.parameters
    assert found.widest == 77 * 32 and found.linear == sum(
        p.numel() for n, p in live.named_parameters() if n.startswith("model.layers.") and p.ndim == 2
    )
    assert census(model_source(live, "model_name_or_path", args)) == found
    assert dtypes.uses_cuda(args) is False


def test_counting_other_architectures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3n has a width per layer; MoE models route tokens to several experts, which are not linear layers."""
    found = census(ModelSource("gemma", None, tiny_config("gemma3n_text"), {}))
    assert found is not None and found.inner == 64 and found.layers == 4
    mixture = census(ModelSource("qwen", None, tiny_config("qwen3_moe"), {}))
    assert mixture is not None and mixture.inner == 64 and 3 * mixture.linear < mixture.parameters
    wide = tiny_config("qwen3_moe")
    wide.moe_intermediate_size, wide.max_position_embeddings = 48, -1
    mixture = census(ModelSource("qwen", None, wide, {}))
    assert mixture is not None and mixture.inner == 2 * 48 and mixture.positions == 4096
    with torch.device("meta"):
        both = AutoModelForCausalLM.from_config(tiny_config("gemma3"))
    assert decoder_layers(both) == list(both.model.language_model.layers), "not those of its image encoder"
    monkeypatch.setattr(memory, "skeleton", lambda *_, **__: (_ for _ in ()).throw(ImportError("timm")))
    assert census(ModelSource("gemma", None, tiny_config("gemma3n_text"), {})) is None


def test_a_plan_for_another_machine_does_not_use_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(engines, "world_size", lambda: 16)
    args = given(tmp_path, deepspeed=zero(2), max_length=64, bf16=None, use_cpu=False)
    model = model_source(make_model(tmp_path / "model"), "model_name_or_path", args)
    with dtypes.planning_for(dtypes.Machine(16, cuda=True)):
        assert memory.smallest_card() is None and world_size() == 16
        reference = engines.plan_engines(args, model, model).reference
    assert reference is not None and "unless it fits on the GPUs of the run" in reference.describe(None)


def test_placement_of_a_reward_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reward = make_model(tmp_path / "model"), make_classifier(tmp_path / "reward")
    prompts = [{"prompt": "abc"}, {"prompt": "de"}]
    for card, expected in ((24e9, "replica"), (1e9, "offload")):
        monkeypatch.setattr(engines, "smallest_card", lambda card=card: card)
        limits = {"max_length": 64, "max_new_tokens": 8}
        args = alignment.OnlineDPOConfig(str(tmp_path / "out"), use_cpu=True, deepspeed=zero(2), **limits)
        trainer = alignment.OnlineDPOTrainer(model, reward_model=reward, args=args, train_dataset=prompts)
        assert isinstance(trainer.resources, OnlineResources)
        assert trainer.resources.classifiers[0].frozen.placement.name == expected
        assert trainer.resources.classifiers[0].batch_size == 2 * args.per_device_train_batch_size
        reason = "fit" if expected == "replica" else "do not fit"
        assert f"GB {reason} in addition to" in trainer.resources.classifiers[0].describe()
        trainer.close()
    args = replace(args, reward_placement="replica", output_dir=str(tmp_path / "asked"))
    trainer = alignment.OnlineDPOTrainer(model, reward_model=reward, args=args, train_dataset=prompts)
    cards = trainer.planned.engines.cards
    tasks = {model: CAUSAL_LM, reward: CLASSIFIER}
    sizes = [census(model_source(path, "", args, task=task)) for path, task in tasks.items()]
    assert cards is not None and None not in sizes
    first, second = (cards._sizes(size, None) for size in sizes if size is not None)
    assert cards._taken == first["offload"] + second["replica"]
    trainer.close()
