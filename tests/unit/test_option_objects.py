"""Options as objects: copies, subclasses, what scripts for TRL do with them, and what a trainer's options refuse."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pydantic
import pytest
from transformers import TrainerState

import alignment
from alignment import CPOTrainer, KTOConfig
from alignment.config.errors import OptionError
from alignment.config.fields import SHARED, marked, option, option_fields
from alignment.config.registry import METHODS, option_names
from alignment.training.callbacks import Events

pytestmark = pytest.mark.usefixtures("one_process")


def values(options: Any) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in option_fields(options)}


@pytest.mark.parametrize("method", METHODS)
def test_copies_have_the_same_values(method: str) -> None:
    """Those of options that ``dataclasses.fields`` omits, too, and those of a trainer."""
    given = {"model_name_or_path": "m", "model_init_kwargs": {"revision": "a"}, "learning_rate": "1e-3"}
    options = METHODS[method]("out", **given)
    for one in (options, options.sealed()):
        for other in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one), copy.copy(one), dataclasses.replace(one)):
            assert type(other) is type(options) and values(other) == values(options)
    deep = copy.deepcopy(options)
    deep.model_init_kwargs["revision"] = "b"
    assert options.model_init_kwargs == {"revision": "a"}
    assert dataclasses.replace(options.sealed(), seed="7").seed == 7, "a new object is not sealed"


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.parametrize("method", METHODS)
def test_trl_parser(method: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("learning_rate: 5e-7\nmodel_init_kwargs: {revision: a}\nreport_to: [none]\n")
    parser = alignment.TrlParser((alignment.ScriptArguments, METHODS[method], alignment.ModelConfig))
    line = "--output_dir o --dataset_name d --model_name_or_path m --use_peft --optim_args a=1 --eval_strategy epoch"
    line += " --use_cpu --bf16 false"
    script, options, model = parser.parse_args_and_config(["--config", str(tmp_path / "own.yaml"), *line.split()])
    expected = METHODS[method](
        "o", learning_rate=5e-7, model_init_kwargs={"revision": "a"}, report_to=["none"], optim_args="a=1",
        eval_strategy="epoch", use_cpu=True, bf16=False,
    )  # fmt: skip
    assert values(options) == values(expected) and (options.use_peft, options.dataset_name) == (False, None)
    assert (script.dataset_name, model.model_name_or_path, model.use_peft) == ("d", "m", True)
    with pytest.raises(OptionError, match="^learning_rate=-1.0: "):
        parser.parse_args_and_config(["--learning_rate", "-1"])


def test_options_shared_with_scripts_are_hidden_from_dataclasses() -> None:
    hidden = option_names(KTOConfig) - {field.name for field in dataclasses.fields(KTOConfig)}
    assert hidden == marked(KTOConfig, SHARED) and {"model_name_or_path", "lora_r", "dataset_name"} <= hidden


class Settings:
    """A class of a script's own, to which no value can be converted."""


@dataclass(kw_only=True)
class Strict(KTOConfig):
    """A subclass with an option that has no default."""

    needed: str


@dataclass
class Derived(KTOConfig):
    """What a user writes: a standard dataclass."""

    steps_between: int = option(2, "An option.")
    settings: Settings | None = option(None, "An object.")
    names: list[str] = dataclasses.field(default_factory=list)
    several: dict[str, Settings] = dataclasses.field(default_factory=dict)
    tone: Annotated[str, pydantic.Field(pattern="^[a-z]+$")] = "calm"
    weight: Annotated[float, pydantic.Field(gt=0)] = 1.0
    calls = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seed += 1

    def resolve(self) -> None:
        super().resolve()
        Derived.calls += 1


def test_a_standard_dataclass_is_validated_as_well() -> None:
    given = {"settings": (settings := Settings()), "several": {"one": settings}, "lora_r": "8", "use_peft": True}
    made = Derived("out", steps_between="3", learning_rate="1e-5", **given)  # type: ignore[arg-type]
    assert (made.steps_between, made.learning_rate, made.names, made.lora_r) == (3, 1e-5, [], 8)
    changed = dataclasses.replace(made, beta=0.5)
    assert (changed.beta, changed.lora_r, changed.seed, changed.sealed().seed) == (0.5, 8, 44, 44)
    assert (changed.sealed().settings, changed.sealed().several) == (settings, {"one": settings})
    assert changed.to_dict()["lora_r"] == 8
    assert Derived().names is not Derived().names
    with pytest.raises(OptionError, match="^needed is required; set it$"):
        Strict("out")
    for name, value in (("weight", 0), ("steps_between", True), ("settings", 3), ("beta", 0), ("steps_betwen", 3)):
        with pytest.raises(OptionError, match=f"^{name}={value}: .{{9}}"):
            Derived("out", **{name: value})
    with pytest.raises(OptionError, match=r"^tone='A': String should match pattern"):
        Derived("out", tone="A")


def test_options_are_resolved_once() -> None:
    Derived.calls = 0
    made = Derived("out")
    made.sealed().check_late()
    assert Derived.calls == 1
    made.precompute_ref_log_probs, made.eval_steps = True, None
    assert made.sealed().ref_placement == "precomputed" and made.sealed().eval_steps == 10, "set since"
    assert made.ref_placement is None and made.eval_steps is None


@pytest.mark.parametrize("method", METHODS)
def test_every_option_of_a_trainer_is_guarded(method: str) -> None:
    options = METHODS[method]("out").sealed()
    still_open = vars(options)["_open"]
    assert {"run_name", "num_train_epochs", "learning_rate", "use_cache"} <= still_open
    for name in option_names(type(options)) - still_open:
        with pytest.raises(OptionError, match=f"^{name}=.*too late to take effect after the trainer was created"):
            setattr(options, name, getattr(options, name))


def test_secrets_are_not_printed() -> None:
    given = {"push_to_hub_token": "s3cret", "model_init_kwargs": {"token": "s3cret", "revision": "main"}}
    assert "s3cret" not in repr(KTOConfig(**given))
    with pytest.raises(OptionError, match="device_map") as refused:
        KTOConfig(model_init_kwargs={"token": "s3cret", "device_map": "cpu"})
    assert "s3cret" not in str(refused.value) and "<TOKEN>" in str(refused.value)


def test_the_local_rank_is_set_by_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """``if args.local_rank in (-1, 0)`` is true on one rank only."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert KTOConfig().local_rank == -1
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (KTOConfig().local_rank, KTOConfig(local_rank=-1).local_rank) == (3, 3)
    assert "local_rank" not in KTOConfig().to_dict()


def test_logging_dir_sets_the_tensorboard_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "other"))
    options = KTOConfig(output_dir=str(tmp_path / "run"), report_to="tensorboard", logging_dir=str(tmp_path / "log"))
    events = Events(options, TrainerState(), [], None)
    events("on_train_begin")
    events("on_train_end")
    assert list((tmp_path / "log").glob("events*")) and not (tmp_path / "other").exists()


def test_log_accepts_the_arguments_of_transformers() -> None:
    """Subclasses call ``super().log(logs, start_time)``."""
    trainer: Any = object.__new__(CPOTrainer)
    trainer.state, trainer.args = TrainerState(), SimpleNamespace(disable_tqdm=False)
    trainer.data = SimpleNamespace(sampler=None)
    trainer.events = lambda *_, **__: None
    trainer.log({"loss": 1.0}, 12.5)
    trainer.log(logs={"loss": 2.0}, start_time=None)
    assert [entry["loss"] for entry in trainer.state.log_history] == [1.0, 2.0]
