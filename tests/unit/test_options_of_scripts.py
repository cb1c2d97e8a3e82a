"""How scripts for TRL use options: they copy, print and extend them, and set values that have no effect here."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerState

from alignment import CPOConfig, CPOTrainer, KTOConfig, OnlineDPOConfig
from alignment.compat.trl.overrides import check_attributes
from alignment.config.errors import OptionError
from alignment.training.callbacks import Events


class Unknown:
    """A type of a script that no value can be converted to."""


@dataclasses.dataclass
class Derived(KTOConfig):
    number: int = 3
    further: Unknown | None = None
    several: dict[str, Unknown] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.learning_rate = 1e-3


def test_additional_fields_of_a_script() -> None:
    thing = Unknown()
    options = Derived(further=thing, several={"one": thing}, number="4", dataset_name="rows")  # type: ignore[arg-type]
    options = options.sealed()
    assert (options.further, options.several, options.number) == (thing, {"one": thing}, 4)
    assert (options.learning_rate, options.dataset_name) == (1e-3, "rows")


@pytest.mark.parametrize(
    ("kind", "given", "name", "expected"),
    [
        (KTOConfig, {"save_total_limit": 0}, "save_total_limit", None),
        (KTOConfig, {"save_total_limit": "-1"}, "save_total_limit", None),
        (KTOConfig, {"max_grad_norm": None}, "max_grad_norm", 0.0),
        (OnlineDPOConfig, {"top_k": "-1"}, "top_k", 0),
        (KTOConfig, {"push_to_hub_model_id": "me/it"}, "hub_model_id", "me/it"),
        (KTOConfig, {"push_to_hub_token": None, "hub_token": "s3cret"}, "hub_token", "s3cret"),
    ],
)
def test_transformers_values_and_names(kind: Any, given: dict[str, Any], name: str, expected: Any) -> None:
    assert getattr(kind(**given), name) == expected


def test_to_dict_round_trips() -> None:
    options = CPOConfig(beta=0.3, loss_type="hinge", model_init_kwargs={"torch_dtype": "bfloat16"})
    assert CPOConfig(**options.to_dict()) == options
    with pytest.raises(OptionError, match="method='cpo'"):
        KTOConfig(**options.to_dict())  # options of another method


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


def test_an_unknown_log_level_is_refused() -> None:
    with pytest.raises(OptionError, match="log_level='inof': .*did you mean 'info'"):
        KTOConfig(log_level="inof")


def test_logging_dir_sets_the_tensorboard_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "other"))
    options = KTOConfig(output_dir=str(tmp_path / "run"), report_to="tensorboard", logging_dir=str(tmp_path / "log"))
    events = Events(options, TrainerState(), [], None)
    events("on_train_begin")
    events("on_train_end")
    assert list((tmp_path / "log").glob("events*")) and not (tmp_path / "other").exists()


@pytest.mark.parametrize("loss", [lambda *_: 0, functools.partial(max, 0)])
def test_a_method_assigned_to_a_trainer_is_refused(loss: Any) -> None:
    trainer = object.__new__(CPOTrainer)
    check_attributes(trainer)
    vars(trainer)["compute_loss"] = loss
    with pytest.raises(OptionError, match=r"trainer\.compute_loss: .* override losses\(\)"):
        trainer.train()


def test_log_accepts_the_arguments_of_transformers() -> None:
    """Subclasses call ``super().log(logs, start_time)``."""
    trainer: Any = object.__new__(CPOTrainer)
    trainer.state, trainer.args = TrainerState(), SimpleNamespace(disable_tqdm=False)
    trainer.data = SimpleNamespace(sampler=None)
    trainer.events = lambda *_, **__: None
    trainer.log({"loss": 1.0}, 12.5)
    trainer.log(logs={"loss": 2.0}, start_time=None)
    assert [entry["loss"] for entry in trainer.state.log_history] == [1.0, 2.0]
