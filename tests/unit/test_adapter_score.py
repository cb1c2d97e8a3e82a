"""The head of a reward model with adapters, and names in a PEFT configuration that the model does not have."""

from __future__ import annotations

import re
from typing import Any

import pytest
from peft import LoraConfig, TaskType, get_peft_model
from support.helpers import make_classifier, make_model
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig, Qwen3MoeConfig

from alignment import RewardConfig
from alignment.config.errors import AlignmentError
from alignment.models.adapters.plan import plan_adapters
from alignment.models.adapters.record import Adapters
from alignment.models.source import ModelSource
from alignment.models.tasks import REWARD_MODEL


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A checkpoint with a head and one without."""
    root = tmp_path_factory.mktemp("models")
    return {"head": make_classifier(root / "classifier"), "none": make_model(root / "language")}


def source(
    path: str | None = None, live: Any = None, config: PretrainedConfig | None = None, **more: Any
) -> ModelSource:
    if config is None:
        config = live.config if live is not None else AutoConfig.from_pretrained(path)
    config.num_labels = 1
    return ModelSource(path, live, config, more, REWARD_MODEL)


def planned(given: Any, path: str | None = None, live: Any = None, **more: Any) -> Adapters:
    model = live.get_base_model() if hasattr(live, "get_base_model") else live
    adapted = live if model is not live else None
    options, stage = RewardConfig("out", **more.pop("options", {})), more.pop("stage", 0)
    found = plan_adapters(options, source(path, model, **more), peft_config=given, live=adapted, stage=stage)
    assert found is not None
    return found


def summary(found: Adapters) -> tuple[str, bool, str]:
    """Return how the head is trained, whether it is saved unchanged, and part of the message."""
    targets = found.config.target_modules
    way = "whole" if "score" in (found.config.modules_to_save or ()) else "lora" if "score" in targets else "frozen"
    said = re.search("random|is frozen|is trained with the adapters|saved with the adapters", " ".join(found.notes))
    return way, found.head, said[0] if said else ""


GIVEN: dict[str, dict[str, Any]] = {
    "no name": {},
    "whole": {"modules_to_save": ["score"]},
    "task": {"task_type": TaskType.SEQ_CLS},
    "target": {"target_modules": ["q_proj", "score"]},
    "pattern": {"target_modules": r".*q_proj|score"},
    "linear": {"target_modules": "all-linear"},
}


@pytest.mark.parametrize(
    ("given", "of_head", "of_none"),
    [
        ("no name", ("frozen", False, "is frozen"), ("whole", False, "is trained with the adapters")),
        ("whole", ("whole", False, ""), ("whole", False, "")),
        ("task", ("whole", False, ""), ("whole", False, "")),
        ("target", ("lora", False, ""), ("lora", True, "saved with the adapters")),
        ("pattern", ("lora", False, ""), ("lora", True, "saved with the adapters")),
        ("linear", ("lora", False, ""), ("whole", False, "is trained with the adapters")),
    ],
)
def test_the_head_with_new_adapters(given: str, of_head: Any, of_none: Any, folders: dict[str, str]) -> None:
    for kind, expected in (("head", of_head), ("none", of_none)):
        found = planned(LoraConfig(**GIVEN[given]), folders[kind])
        assert summary(found) == expected, kind
        assert found.config.task_type == ("SEQ_CLS" if expected[0] == "whole" else None)


def test_options_train_the_head(folders: dict[str, str]) -> None:
    assert summary(planned(None, folders["head"], options={"use_peft": True})) == ("whole", False, "")


def test_the_head_with_adapters_of_a_live_model(folders: dict[str, str]) -> None:
    for kind, given, expected in (
        ("head", "no name", ("frozen", True, "is frozen")),
        ("head", "task", ("whole", False, "")),
        ("head", "target", ("lora", True, "")),
        ("none", "no name", ("frozen", True, "random")),
        ("none", "task", ("whole", False, "")),
        ("none", "target", ("lora", True, "saved with the adapters")),
    ):
        model = AutoModelForSequenceClassification.from_pretrained(folders[kind], num_labels=1)
        given_config = LoraConfig(**{"target_modules": ["q_proj"], **GIVEN[given]})
        assert summary(planned(None, live=get_peft_model(model, given_config))) == expected, (kind, given)


def test_names_that_the_model_does_not_have(folders: dict[str, str]) -> None:
    """PEFT ignores them if at least one name exists; for options they are an error."""
    for said, given, options in (
        ("peft_config: ", LoraConfig(target_modules=["w1"]), {}),
        ("lora_target_modules: .*'w1'", None, {"use_peft": True, "lora_target_modules": ["q_proj", "w1"]}),
    ):
        with pytest.raises(AlignmentError, match=f"^{said}"):
            planned(given, folders["head"], options=options)
    planned(LoraConfig(target_modules=["q_proj", "gate"], modules_to_save=["classifier"]), folders["head"])


def test_targets_of_fused_experts() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3MoeConfig(vocab_size=32, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, **sizes)
    given = LoraConfig(r=3, target_modules=["gate_proj", "up_proj", "down_proj", "score"])
    found = planned(given, "some/where", config=config)
    assert found.config.target_modules == ["score"] and found.config.target_parameters == ["down_proj", "gate_up_proj"]
    assert found.config.rank_pattern == {r".*\.gate_up_proj": 6}, "of two matrices in one"
    assert not any("get no adapter" in note for note in found.notes)
    assert given.target_parameters is None
    with pytest.raises(AlignmentError, match="^lora_target_parameters: "):
        planned(given, "some/where", config=config, stage=3)
    for wrong in (["up_proj", "score"], given.target_modules):
        with pytest.raises(AlignmentError, match="^peft_config: "):
            planned(LoraConfig(target_modules=wrong, lora_dropout=0.1), "some/where", config=config)
