"""Where a reference lives on a GPU: chosen from sizes, the same for every rank and every start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_classifier, make_model, options, zero
from transformers import AutoModelForCausalLM

import alignment
from alignment.config import dtypes
from alignment.config.options import AlignmentConfig
from alignment.models.source import model_source
from alignment.online.resources import OnlineResources
from alignment.planning import engines, memory
from alignment.planning.memory import Cards, Census, Use, bytes_of_parameter, census, use_of_policy

pytestmark = pytest.mark.usefixtures("own_process_group")
HALF = Census(494_000_000, 14_900_000, 24, 896, 4864, 32768)
EIGHT = Census(8_030_000_000, 218_000_000, 32, 4096, 14336, 131072)
CARD = 24e9


def given(folder: Path, **more: Any) -> AlignmentConfig:
    return alignment.KTOConfig(**options(folder, **{"max_length": 1024, **more}))


def placed(
    folder: Path, policy: Census, reference: Census, ranks: int = 1, *, config: dict[str, Any], card: float = CARD
) -> str:
    args = given(folder)
    use = use_of_policy(args, policy, config, itemsize=2, ranks=ranks)
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


def test_what_training_takes_of_a_card(tmp_path: Path) -> None:
    """FACTS of AdamW with fp32 masters: 22 bytes per parameter at its step; less where it is divided or elsewhere."""
    args = given(tmp_path)

    def weights(config: dict[str, Any], **more: Any) -> float:
        return use_of_policy(args, HALF, config, **{"itemsize": 2, "ranks": 1, **more}).weights / HALF.parameters

    assert weights(zero(2)) == weights(zero(0)) == 22
    assert weights(zero(0), itemsize=4) == 20
    assert weights(zero(2), ranks=4) == 2 + 20 / 4 and weights(zero(0), ranks=4) == 22
    assert weights(zero(2, optimizer=True)) == 4
    whole = 3 * 2 * HALF.layer / HALF.parameters
    assert weights(zero(3), ranks=4) == pytest.approx(whole + 22 / 4)
    assert weights(zero(3, optimizer=True, parameters=True), ranks=2) == pytest.approx(whole)
    assert weights(zero(2), adapters=True, bits=4) == pytest.approx(0.6 + 0.02 * 20)
    assert bytes_of_parameter(2, 8) == 1.1 and bytes_of_parameter(4, None) == 4.0


def test_activations_count(tmp_path: Path) -> None:
    """2 T H L bytes with checkpointing and one layer of (29 + 8 f/H) T H; all layers of it without."""
    tokens, tiles = 2 * 2 * 1024, 3 * 256 * 2**20
    layer = (29 + 8 * 4864 / 896) * tokens * 896
    work = use_of_policy(given(tmp_path), HALF, zero(2), itemsize=2, ranks=1).work
    assert work == pytest.approx(2 * tokens * 896 * 24 + layer + tiles)
    work = use_of_policy(given(tmp_path, gradient_checkpointing=False), HALF, zero(2), itemsize=2, ranks=1).work
    assert work == pytest.approx(24 * layer + layer + tiles)


def test_rollouts_are_left_more_room(tmp_path: Path) -> None:
    online = alignment.OnlineDPOConfig(output_dir=str(tmp_path))
    just = Census(6_250_000_000, 0, 0, 1, 1, 1)
    assert Cards(given(tmp_path), Use(0, 0), 2, 1, 20e9).chosen(just).placement == "replica"
    assert Cards(online, Use(0, 0), 2, 1, 20e9).chosen(just).placement == "offload"


def test_models_are_placed_beside_each_other(tmp_path: Path) -> None:
    """The second replica finds the first one there; one that is gone before training takes nothing."""
    cards, model = Cards(given(tmp_path), Use(2e9, 0), 2, 1, CARD), Census(4_000_000_000, 0, 0, 1, 1, 1)
    assert cards.chosen(model, alone=True).placement == "replica"
    assert [cards.chosen(model).placement for _ in range(2)] == ["replica", "offload"]
    assert cards.chosen(model, bits=4).placement == "replica", "2.4 GB still fit"
    assert cards.chosen(Census(7_000_000_000, 0, 0, 1, 1, 1), alone=True).placement == "replica"


@pytest.mark.parametrize(("card", "expected"), [(24e9, "replica"), (1e9, "offload")])
def test_a_run_says_where_its_reference_lives_and_why(
    card: float, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "smallest_card", lambda: card)
    args = given(tmp_path, deepspeed=zero(2), max_length=64)
    model = model_source(make_model(tmp_path / "model"), "model_name_or_path", args)
    reference = engines.plan_engines(args, model, model).reference
    assert reference is not None and reference.frozen.placement.name == expected
    said = reference.describe(None)
    assert f"{expected} (" in said and ("GB fit beside" if expected == "replica" else "GB do not fit beside") in said
    asked = given(tmp_path, deepspeed=zero(2), max_length=64, ref_placement="sharded")
    assert "by size" not in engines.plan_engines(asked, model, model).reference.describe(None)
    monkeypatch.undo()
    plain = engines.plan_engines(args, model, model).reference
    assert plain.frozen.placement.name == "replica" and "by size" not in plain.describe(None)


def test_the_smallest_card_of_all_ranks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 24 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5)
    other = 11e9
    monkeypatch.setattr(memory, "largest_numbers", lambda values: [max(values[0], -other)])
    assert memory.smallest_card() == other
    other = 30e9
    assert memory.smallest_card() == 12e9, "no more than its process may take"


def test_a_model_is_counted_without_its_weights(tmp_path: Path) -> None:
    args = given(tmp_path)
    path = make_model(tmp_path / "model", "untied", layers=3)
    found = census(model_source(path, "model_name_or_path", args))
    live = AutoModelForCausalLM.from_pretrained(path)
    assert found is not None and found.parameters == sum(p.numel() for p in live.parameters())
    assert (found.layers, found.hidden, found.inner, found.positions) == (3, 32, 48, 96)
    assert 3 * found.layer + 2 * 77 * 32 + 32 == found.parameters
    assert census(model_source(live, "model_name_or_path", args)) == found
    assert dtypes.uses_cuda(args) is False


def test_a_reward_model_is_placed_beside_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reward = make_model(tmp_path / "model"), make_classifier(tmp_path / "reward")
    for card, expected in ((24e9, "replica"), (1e9, "offload")):
        monkeypatch.setattr(engines, "smallest_card", lambda card=card: card)
        args = alignment.OnlineDPOConfig(
            output_dir=str(tmp_path / "out"), use_cpu=True, max_length=64, max_new_tokens=8, deepspeed=zero(2)
        )
        trainer = alignment.OnlineDPOTrainer(
            model, reward_model=reward, args=args, train_dataset=[{"prompt": "abc"}, {"prompt": "de"}]
        )
        assert isinstance(trainer.resources, OnlineResources)
        assert trainer.resources.classifiers[0].frozen.placement.name == expected
        trainer.close()
