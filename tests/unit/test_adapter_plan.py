"""Adapters without an engine: what is planned before weights are loaded, heads of reward models, and injection."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from support.helpers import make_classifier, make_model, tiny_config
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from alignment import KTOConfig
from alignment.config.errors import AlignmentError
from alignment.models.adapters.injection import REFERENCE, Given, equip, inject, keep_given
from alignment.models.adapters.plan import plan_adapters
from alignment.models.adapters.record import Adapters
from alignment.models.quantization import Quantization
from alignment.models.source import ModelSource, model_source
from alignment.models.tasks import CAUSAL_LM, REWARD_MODEL, Task
from alignment.models.vocabulary import Vocabulary

LINEAR = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]


def planned(
    kind: str | PretrainedConfig = "untied",
    *,
    config: Any = None,
    live: Any = None,
    bits: int | None = None,
    stage: int = 0,
    task: Task = CAUSAL_LM,
    path: str | None = "some/model",
    **options: Any,
) -> Adapters | None:
    """Return the plan for a tiny model."""
    own = tiny_config(kind) if isinstance(kind, str) else kind
    own.num_labels = 1
    if config is None and live is None and "adapter_name_or_path" not in options:
        options = {"use_peft": True, **options}
    quantization = None if bits is None else Quantization(BitsAndBytesConfig(**{f"load_in_{bits}bit": True}))
    return plan_adapters(
        KTOConfig("out", **options),
        ModelSource(path, None if live is None else live.get_base_model(), own, {}, task),
        peft_config=config,
        live=live,
        quantization=quantization,
        stage=stage,
    )


def of(found: Adapters | None) -> Any:
    """Return the configuration of a plan."""
    return found.config


def test_unset_targets_are_all_linear_layers_but_the_head() -> None:
    for more in ({}, {"config": LoraConfig()}, {"config": LoraConfig(target_modules="all-linear")}):
        assert sorted(of(planned(**more)).target_modules) == LINEAR
    found = planned()
    assert found is not None and "lm_head" not in found.layers and len(found.layers) == 2 * len(LINEAR)
    assert of(planned(config=peft.IA3Config())).feedforward_modules == []


def test_the_options_become_a_configuration() -> None:
    given = {"lora_r": 4, "lora_alpha": 6, "lora_dropout": 0.2, "use_rslora": True, "use_dora": True}
    config = of(planned(**given, lora_target_modules="q_proj", lora_modules_to_save=["lm_head"]))
    assert {name: getattr(config, name.replace("lora_r", "r")) for name in given} == given
    assert (config.target_modules, config.modules_to_save, config.task_type) == (["q_proj"], ["lm_head"], "CAUSAL_LM")
    assert config.base_model_name_or_path == "some/model" and not config.inference_mode
    assert of(planned(lora_target_modules=r".*\.(q|v)_proj")).target_modules == r".*\.(q|v)_proj"


def test_trainable_parameters_are_counted() -> None:
    """Every q_proj of 32 x 32 gets 2 x 4 x 32 parameters; the saved head is a separate copy."""
    found = planned(lora_r=4, lora_target_modules="q_proj", lora_modules_to_save=["lm_head"])
    whole = AutoModelForCausalLM.from_config(tiny_config("untied"))
    head = whole.get_output_embeddings().weight.numel()
    assert found is not None and found.trained == 2 * 2 * 4 * 32 + head
    assert found.total == sum(p.numel() for p in whole.parameters()) + found.trained
    assert f"{found.trained:,} of {found.total:,}" in found.describe()
    assert found.describe().startswith("LoRA r=")


def test_routers_are_excluded_and_experts_reported() -> None:
    found = planned("moe")
    assert sorted(of(found).target_modules) == ATTENTION
    assert found is not None and "down_proj, gate_up_proj) get no adapters;" in found.notes[0]
    named = planned("moe", lora_dropout=0.0, lora_target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    assert named is not None and named.notes == ()


EXPERTS: dict[str, Any] = {"kind": "moe", "lora_target_parameters": ["experts.down_proj"]}


@pytest.mark.parametrize(
    ("said", "more"),
    [
        ("lora_target_modules: the model has no 'q_prj'", {"lora_target_modules": ["q_prj", "v_proj"]}),
        ("lora_target_modules: ", {"lora_target_modules": "nothing.*"}),
        ("lora_modules_to_save: the model has no 'head'", {"lora_modules_to_save": ["head"]}),
        ("lora_target_parameters: the model has no 'x'", {"lora_target_parameters": ["x"], "lora_dropout": 0.0}),
        ("lora_target_modules: .*lora_dropout", EXPERTS),
        ("lora_target_parameters: ", {**EXPERTS, "lora_dropout": 0.0, "stage": 3}),
        ("some/model: 4-bit", {"use_peft": False, "bits": 4}),
        ("use_dora=True: ", {"use_dora": True, "bits": 4, "stage": 3}),
        ("peft_config: PREFIX_TUNING", {"config": peft.PrefixTuningConfig(num_virtual_tokens=2)}),
        ("peft_config: VERA", {"config": peft.VeraConfig()}),
        ("peft_config: LOHA", {"config": peft.LoHaConfig(), "stage": 3}),
        ("peft_config: LOKR", {"config": peft.LoKrConfig(), "bits": 8}),
        ("peft_config: init_lora_weights='pissa'", {"config": LoraConfig(init_lora_weights="pissa")}),
        ("peft_config: init_lora_weights='eva'", {"config": LoraConfig(init_lora_weights="eva")}),
        ("peft_config: layer_replication", {"config": LoraConfig(layer_replication=[(0, 2), (1, 2)])}),
        ("peft_config: dict", {"config": {"r": 4}}),
        ("adapter_name_or_path: conflicts", {"config": LoraConfig(), "adapter_name_or_path": "x"}),
        ("adapter_name_or_path: .*/nowhere", {"adapter_name_or_path": "/nowhere"}),
        ("merged_output_dir='m': .* pass its path", {"path": None, "merged_output_dir": "m"}),
        ("merged_output_dir='m': .* no adapters", {"use_peft": False, "merged_output_dir": "m"}),
        ("model_adapter_name='a'", {"model_adapter_name": "a"}),
        ("ref_adapter_name='a'", {"ref_adapter_name": "a"}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(said: str, more: dict[str, Any]) -> None:
    with pytest.raises(AlignmentError, match=f"^{said}") as caught:
        planned(**more)
    assert "\n" not in str(caught.value)


def test_a_configuration_replaces_use_peft_and_is_not_modified() -> None:
    """TRL's scripts set both."""
    config = LoraConfig(r=3, target_modules=None)
    assert of(planned(config=config, use_peft=True)).r == 3
    assert config.target_modules is None and config.task_type is None
    assert planned(use_peft=False) is None


# Existing adapters --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a trained adapter."""
    folder = tmp_path_factory.mktemp("models")
    model = AutoModelForCausalLM.from_pretrained(make_model(folder, "untied"))
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(folder / "adapter")
    return folder


def test_an_adapter_of_another_base(trained: Path) -> None:
    path = str(trained / "adapter")
    assert of(planned(adapter_name_or_path=path)).r == 2
    wide = tiny_config("untied")
    wide.hidden_size = 64
    for more, said in (
        ({"kind": wide}, r"lora_A.weight has shape \(2, 32\).*\(2, 64\)"),
        ({"task": REWARD_MODEL}, "score"),
    ):
        with pytest.raises(AlignmentError, match=f"^adapter_name_or_path: .*{said}"):
            planned(adapter_name_or_path=path, **more)


def test_live_adapters(trained: Path) -> None:
    def live(*names: str) -> Any:
        base = AutoModelForCausalLM.from_pretrained(trained)
        model = PeftModel.from_pretrained(base, trained / "adapter", adapter_name=names[0])
        for name in names[1:]:
            model.load_adapter(trained / "adapter", adapter_name=name)
        return model

    found = planned(live=live("one"))
    assert found is not None and (found.name, found.reference, found.are_new) == ("one", None, False)
    assert found.trained == 2 * 2 * 2 * 32
    both = planned(live=live("one", "two"), model_adapter_name="two", ref_adapter_name="one")
    assert both is not None and (both.name, both.reference) == ("two", "one")
    for said, more in (
        ("model_adapter_name='three'", {"model_adapter_name": "three"}),
        ("ref_adapter_name='one'", {"ref_adapter_name": "one"}),
        ("adapter_name_or_path: conflicts", {"adapter_name_or_path": "x"}),
    ):
        with pytest.raises(AlignmentError, match=f"^{said}"):
            planned(live=live("one", "two"), **more)
    several, merged = live("one", "two"), live("one")
    several.base_model.set_adapter(["one", "two"])
    merged.merge_adapter()
    for model in (several, merged):
        with pytest.raises(AlignmentError, match="^model: "):
            planned(live=model)


# The head of a reward model ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A checkpoint with a head and one without."""
    root = tmp_path_factory.mktemp("models")
    return {"head": make_classifier(root / "classifier"), "none": make_model(root / "language")}


def planned_reward(given: Any, path: str | None = None, live: Any = None, **options: Any) -> Adapters:
    """Return the plan for a reward model."""
    config = AutoConfig.from_pretrained(path) if live is None else live.config
    found = planned(config, path=path, config=given, live=live, task=REWARD_MODEL, **options)
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
        found = planned_reward(LoraConfig(**GIVEN[given]), folders[kind])
        assert summary(found) == expected, kind
        assert found.config.task_type == ("SEQ_CLS" if expected[0] == "whole" else None)


def test_options_train_the_head(folders: dict[str, str]) -> None:
    assert summary(planned_reward(None, folders["head"])) == ("whole", False, "")


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
        assert summary(planned_reward(None, live=get_peft_model(model, given_config))) == expected, (kind, given)


def test_names_that_the_model_does_not_have(folders: dict[str, str]) -> None:
    """PEFT ignores them if at least one name exists; for options they are an error."""
    with pytest.raises(AlignmentError, match="^peft_config: "):
        planned_reward(LoraConfig(target_modules=["w1"]), folders["head"])
    planned_reward(LoraConfig(target_modules=["q_proj", "gate"], modules_to_save=["classifier"]), folders["head"])


def test_targets_of_fused_experts() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3MoeConfig(vocab_size=32, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, **sizes)

    def plan(given: LoraConfig, stage: int = 0) -> Any:
        return planned(config, config=given, task=REWARD_MODEL, stage=stage)

    given = LoraConfig(r=3, target_modules=["gate_proj", "up_proj", "down_proj", "score"])
    found = plan(given)
    assert found.config.target_modules == ["score"] and found.config.target_parameters == ["down_proj", "gate_up_proj"]
    assert found.config.rank_pattern == {r".*\.gate_up_proj": 6}, "of two matrices in one"
    assert not any("get no adapter" in note for note in found.notes)
    assert given.target_parameters is None
    with pytest.raises(AlignmentError, match="^lora_target_parameters: "):
        plan(given, stage=3)
    for wrong in (["up_proj", "score"], given.target_modules):
        with pytest.raises(AlignmentError, match="^peft_config: "):
            plan(LoraConfig(target_modules=wrong, lora_dropout=0.1))


# Injection: dtypes, what is trained, and the frozen copy -------------------------------------------------------------


def made(base: str, seed: int = 3, dtype: torch.dtype = torch.float32, **config: Any) -> tuple[Any, Adapters]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    adapters = Adapters(LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **config))
    inject(model, adapters, ds_config={}, dtype=dtype, seed=seed)
    return model, adapters


def weights(model: Any, name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in model.named_parameters() if f".{name}." in f"{key}."}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_initial_policy_is_kept_while_its_adapters_are_trained(base: str, dtype: torch.dtype) -> None:
    model, adapters = made(base, dtype=dtype, modules_to_save=["lm_head"])
    with torch.no_grad():
        for number, value in enumerate(weights(model, "default").values()):
            value.fill_(number + 1.0)
    for run in range(2):  # a second run keeps what is trained by then
        assert keep_given(model, adapters, ds_config={}, dtype=dtype) == REFERENCE
        own, kept = (list(weights(model, name).values()) for name in ("default", REFERENCE))
        assert [float(value.flatten()[0]) for value in kept] == [1.0 + run, *range(2, len(own) + 1)]
        assert all(map(torch.equal, own, kept)) and {value.dtype for value in kept} == {dtype}
        assert all(value.requires_grad for value in own) and not any(value.requires_grad for value in kept)
        assert model.get_parameter("model.norm.weight").dtype == torch.bfloat16, "as it was loaded"
        with torch.no_grad():
            own[0].add_(1.0)
        assert not torch.equal(own[0], kept[0])
    assert model.active_adapters() == ["default"]


@pytest.mark.parametrize(("start", "copied"), [(True, False), ("gaussian", False), (False, True)])
def test_only_new_adapters_without_effect_are_disabled_for_the_initial_policy(
    base: str, start: bool | str, copied: bool
) -> None:
    """In a later run, the same adapters may have been trained."""
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=start, task_type="CAUSAL_LM")  # type: ignore[arg-type]
    found = [
        equip(model, Adapters(config), ds_config={}, dtype=torch.float32, seed=1, keep=True)
        for _ in ("first", "later")
    ]
    assert found == [Given(REFERENCE if copied else None), Given(REFERENCE)]


# New tokens ---------------------------------------------------------------------------------------------------------


def test_a_model_that_knows_new_tokens(trained: Path) -> None:
    options, vocabulary = KTOConfig("out"), Vocabulary(rows=128, new=(77,), eos=77)
    given = model_source(str(trained), "model", options)
    known = given.knowing(vocabulary)
    assert known.vocabulary == vocabulary and (known.config.vocab_size, known.config.eos_token_id) == (128, 77)
    assert given.vocabulary == Vocabulary() and (given.config.vocab_size, given.config.eos_token_id) == (77, 1)
    model = AutoModelForCausalLM.from_pretrained(trained)
    live = model_source(model, "model", options).knowing(vocabulary)
    assert live.live is model and live.vocabulary == vocabulary
    assert (model.get_input_embeddings().num_embeddings, model.config.eos_token_id) == (128, 77)


ENDS = ["embed_tokens", "lm_head"]


@pytest.mark.parametrize(
    ("config", "saved", "named"),
    [
        ({"target_modules": None}, ENDS, " and ".join(ENDS)),
        ({"target_modules": ["q_proj", "lm_head"]}, ["embed_tokens"], "embed_tokens"),
        ({"target_modules": ".*v_proj", "modules_to_save": ["norm"]}, [*ENDS, "norm"], " and ".join(ENDS)),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [77]}, None, None),
    ],
)  # fmt: skip
def test_embeddings_of_new_tokens_are_trained(config: Any, saved: Any, named: str | None, trained: Path) -> None:
    options = KTOConfig("out")
    source = model_source(str(trained), "model", options).knowing(Vocabulary(rows=128, new=(77,)))
    made = plan_adapters(options, source, peft_config=LoraConfig(**config))
    assert made is not None and made.config.modules_to_save == saved  # type: ignore[attr-defined]
    found = [note for note in made.notes if note.startswith(f"chat_template_path: {named} ") and "saved with" in note]
    assert len(found) == len(made.notes) == (named is not None)


def test_plans_that_would_lose_something(trained: Path) -> None:
    options = KTOConfig(str(trained), use_peft=True)
    with pytest.raises(AlignmentError, match="^output_dir='.*': this folder contains the base model"):
        plan_adapters(options, model_source(str(trained), "model", options))
    live = get_peft_model(AutoModelForCausalLM.from_pretrained(trained), LoraConfig(target_modules=["q_proj"]))
    live.peft_config["default"].layer_replication = [(0, 1)]
    with pytest.raises(AlignmentError, match="^model: layer_replication.* is not supported; remove it"):
        planned(live=live)
