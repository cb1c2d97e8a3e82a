"""Precomputed references in runs: the same results as a live one, computed once, even if interrupted."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from datasets import IterableDataset
from peft import LoraConfig, get_peft_model
from support.helpers import make_model, options, paired_rows, unpaired_rows
from transformers import AutoModelForCausalLM

import alignment
from alignment import DPOConfig, KTOConfig
from alignment.config.errors import OptionError
from alignment.data.windows import set_partners
from alignment.internals.transformers import loading
from alignment.references import store
from alignment.references.content import live_content
from alignment.references.engine import EngineReference, ReferencePlan
from alignment.references.store import LogpStore
from alignment.training import precompute, run_engines
from alignment.training.data import order_seed
from alignment.training.trainer import AlignmentTrainer

pytestmark = pytest.mark.usefixtures("own_process_group")
TIMES = ("runtime", "per_second")
LIVE = "replica"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models with dropout, so that a shifted random stream changes the loss."""
    folder = tmp_path_factory.mktemp("models")
    names = ("policy", "reference")
    return {name: make_model(folder / name, seed=seed, dropout=0.3) for seed, name in enumerate(names)}


@pytest.fixture(autouse=True)
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for this test's stores, with four parts for ten rows."""
    monkeypatch.setattr(store, "PART_ROWS", 3)
    monkeypatch.setattr(precompute, "tokenized_folder", lambda: tmp_path / "cache" / "deepspeed-alignment")
    return tmp_path / "cache" / "deepspeed-alignment"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record what is built and released, in order."""
    events: list[str] = []
    build, close, policy = ReferencePlan.build, EngineReference.close, run_engines.build_engine

    def reference(plan: ReferencePlan, args: Any) -> EngineReference:
        events.append("reference")
        return build(plan, args)

    def released(engine: EngineReference) -> None:
        events.append("released")
        close(engine)

    def trained(*args: Any, **kwargs: Any) -> Any:
        events.append("policy")
        return policy(*args, **kwargs)

    monkeypatch.setattr(ReferencePlan, "build", reference)
    monkeypatch.setattr(EngineReference, "close", released)
    monkeypatch.setattr(run_engines, "build_engine", trained)
    return events


def rows_of(method: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    return unpaired_rows(count, seed) if method == "KTO" else paired_rows(count, seed)


def make(method: str, model: Any, reference: Any, folder: Path, **more: Any) -> AlignmentTrainer:
    """Return a trainer of ten rows in windows of four, with micro-batches of one row by default."""
    given = {
        "ref_placement": "precomputed",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 2,
        "eval_strategy": "epoch",
        "optim": "sgd",
        "disable_dropout": False,
        **more,
    }
    return getattr(alignment, f"{method}Trainer")(
        model,
        reference,
        args=getattr(alignment, f"{method}Config")(**options(folder, **given)),
        train_dataset=rows_of(method, 10),
        eval_dataset={"a": rows_of(method, 5, seed=3), "b": rows_of(method, 4, seed=4)},
    )


def finished(trainer: AlignmentTrainer, method: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Return everything that a run logs, including another evaluation at its end, and the weights."""
    trainer.train()
    trainer.evaluate(rows_of(method, 5, seed=3))  # those of the constructor
    log = [{n: v for n, v in entry.items() if not n.endswith(TIMES)} for entry in trainer.state.log_history]
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.close()
    return log, weights


def stored(folder: Path) -> dict[str, bytes]:
    """Return the files of the stores by name."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.glob("reference-*/*"))}


@pytest.mark.parametrize("method", ["KTO", "DPO"])
def test_a_precomputed_reference_trains_like_a_live_one(
    method: str, models: dict[str, str], tmp_path: Path, stores: Path, built: list[str]
) -> None:
    """Bitwise for equal batches; for two epochs and evaluations."""
    precomputed = make(method, models["policy"], models["reference"], tmp_path / "precomputed")
    log, weights = finished(precomputed, method)
    assert built == ["reference", "released", "policy"]
    assert {"precompute", "reference", "eval reference"} <= precomputed.phases.records.keys()
    files = stored(stores)
    assert sum(name.endswith(".safetensors") for name in files) == 4 + 2 + 2

    live = make(method, models["policy"], models["reference"], tmp_path / "live", ref_placement=LIVE)
    if method == "KTO":
        assert live.data.sampler is not None and live.data.sampler.partners is None
        live.data.sampler.partners = set_partners(live.data.train.table, order_seed(live.args), draw=True)
    expected, expected_weights = finished(live, method)
    assert "precompute" not in live.phases.records
    assert log == expected
    assert all(torch.equal(value, expected_weights[name]) for name, value in weights.items())

    if method == "DPO":
        return  # other batches on two ranks: test_split_grid.py
    built.clear()
    given = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "disable_dropout": True,
        "pack": False,
    }
    again = make(method, models["policy"], models["reference"], tmp_path / "again", **given)
    found, _ = finished(again, method)
    assert built == ["policy"] and stored(stores) == files, "the store was complete, and is unchanged"
    live = make(method, models["policy"], models["reference"], tmp_path / "other", ref_placement=LIVE, **given)
    live.data.sampler.partners = again.data.sampler.partners
    expected, _ = finished(live, method)
    assert found != expected, "its batches differ from the store's"
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=5e-6), "rewards are small differences of large sums"
        assert [one[n] for n in one if n.endswith("loss")] == pytest.approx(
            [other[n] for n in other if n.endswith("loss")], rel=0, abs=1e-6
        )


@pytest.mark.ci
def test_dropout_is_unchanged_if_the_store_exists(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if models draw random numbers while loading."""
    build = ReferencePlan.build

    def drawing(plan: ReferencePlan, args: Any) -> EngineReference:
        random.random(), np.random.rand(), torch.rand(1)
        return build(plan, args)

    monkeypatch.setattr(ReferencePlan, "build", drawing)
    logs = [
        finished(make("DPO", models["policy"], None, tmp_path / name, max_steps=1, eval_strategy="no"), "DPO")[0]
        for name in ("computes", "finds")
    ]
    assert logs[0] == logs[1]


# The key of a store -------------------------------------------------------------------------------------------------

CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("rows", {"max_completion_length": 9}),
    ("lengths", {"max_completion_length": 9}),
    ("lengths", {"max_length": 60}),
    ("partners", {"data_seed": 5}),
    ("mismatched", {"loss_type": "apo_zero_unpaired"}),
    ("dtype", {"bf16": True}),
    ("model", {"attn_implementation": "eager"}),
    ("model", {"model_init_kwargs": {"use_cache": False}}),
]


def key_of(trainer: AlignmentTrainer) -> dict[str, Any]:
    """Return the key of the training data's store."""
    stores = trainer.engines.stores
    stores.lines()
    return stores.key(trainer.data.train)


def adapter(model: str, folder: Path, seed: int) -> str:
    """Create a PEFT folder with random adapters for ``model``."""
    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(folder)
    return str(folder)


def test_the_key_has_everything_that_affects_the_log_probs(models: dict[str, str], tmp_path: Path) -> None:
    """And nothing else, so that sweeps over other options reuse the store."""
    trainer = make("KTO", models["policy"], None, tmp_path)
    own = key_of(trainer)
    with mock.patch.dict(vars(trainer.args), use_liger_kernel=True):  # refused without a GPU
        assert key_of(trainer)["model"] == {**own["model"], "liger": {}}
    assert list(own) == ["rows", "lengths", "partners", "mismatched", "model", "adapters", "dtype", "quantization"]
    for part, change in CHANGES:
        other = key_of(make("KTO", models["policy"], None, tmp_path, **change))
        assert other[part] != own[part], change
    sweeps: list[dict[str, Any]] = [
        {"learning_rate": 1e-5, "beta": 0.5, "seed": 0, "data_seed": 42, "desirable_weight": 2.0},
        {"per_device_train_batch_size": 2, "num_train_epochs": 1, "ref_deepspeed": "ref_sharded"},
        {"model_init_kwargs": {"token": "hf_of_another_day"}},  # the key is also written to the store
    ]
    for sweep in sweeps:
        assert key_of(make("KTO", models["policy"], None, tmp_path, **sweep)) == own
    assert key_of(make("DPO", models["policy"], None, tmp_path, seed=7))["partners"] is None
    # New adapters do not change the initial policy; adapters from a folder and a 4-bit base model do.
    assert key_of(make("KTO", models["policy"], None, tmp_path, use_peft=True)) == own
    packed = key_of(make("KTO", models["policy"], None, tmp_path, use_peft=True, load_in_4bit=True))
    assert own["quantization"] is None and packed["quantization"]["bnb_4bit_quant_type"] == "nf4"
    folders = [adapter(models["policy"], tmp_path / f"adapter-{seed}", seed) for seed in (0, 1)]
    keys = [key_of(make("KTO", models["policy"], None, tmp_path, adapter_name_or_path=folder)) for folder in folders]
    assert own["adapters"] is None and keys[0]["adapters"] != keys[1]["adapters"]
    assert key_of(make("KTO", models["policy"], models["reference"], tmp_path))["model"] != own["model"]


def test_different_rows_have_different_stores(models: dict[str, str], tmp_path: Path) -> None:
    """Rows are identified by their tokens only."""

    def content(rows: list[dict[str, Any]]) -> str:
        args = alignment.DPOConfig(**options(tmp_path, ref_placement="precomputed"))
        trainer = alignment.DPOTrainer(models["policy"], args=args, train_dataset=rows)
        return precompute.rows_content(trainer.data.train, trainer.method.completions)

    first, second = {"prompt": "ab", "chosen": "cd", "rejected": "e"}, {"prompt": "x", "chosen": "y", "rejected": "z"}
    found = [
        content([first, second]),
        content([second, first]),
        content([first, second, first]),
        content([{**first, "chosen": "cf"}, second]),
        content([{**first, "prompt": "abc", "chosen": "d"}, second]),
        content([{**first, "chosen": "e", "rejected": "cd"}, second]),
        content([{**first, "chosen": "ce", "rejected": "d"}, second]),
        content([{**first, "prompt": "a"}, {**second, "prompt": "bx"}]),
    ]
    assert len(set(found)) == len(found)
    assert content([first]) != content([{**first, "prompt": "abc", "chosen": "d"}])
    assert content([{**row, "more": 1} for row in (first, second)]) == found[0]


def test_different_weights_have_different_stores(
    models: dict[str, str], tmp_path: Path, stores: Path, built: list[str]
) -> None:
    folder = shutil.copytree(models["reference"], tmp_path / "reference")
    trainer = make("DPO", models["policy"], str(folder), tmp_path)
    trainer.precompute()
    before, first = key_of(trainer), stored(stores)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-2] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert key_of(trainer) == before, "a run keeps its initial reference"
    trainer = make("DPO", models["policy"], str(folder), tmp_path)
    assert key_of(trainer)["model"] != before["model"]
    trainer.precompute()
    second = stored(stores)
    assert built == ["reference", "released"] * 2
    first.pop("file-hashes.json", None)
    second.pop("file-hashes.json", None)
    assert len(second) == 2 * len(first) and first.items() <= second.items()


def test_a_partitioned_model_has_the_content_of_an_unpartitioned_one(models: dict[str, str]) -> None:
    alignment.KTOConfig("out", use_cpu=True)
    whole = AutoModelForCausalLM.from_pretrained(models["policy"], dtype=torch.float32)
    with loading({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}):
        divided = AutoModelForCausalLM.from_pretrained(models["policy"], dtype=torch.float32)
    assert all(hasattr(parameter, "ds_id") for parameter in divided.parameters())
    assert live_content(divided, keep=True) == live_content(whole, keep=True)


# Interrupted passes -------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands in for a signal."""


def interrupted(trainer: AlignmentTrainer, part: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Precompute up to the write of the ``part``-th part; end before, during or after it."""
    parts, write = [0], LogpStore.write

    def counted(one: LogpStore, *args: Any) -> None:
        parts[0] += 1
        if parts[0] < part:
            return write(one, *args)
        if where == "in a write":
            with monkeypatch.context() as patched:
                patched.setattr(os, "replace", lambda *names: _end())
                write(one, *args)
        elif where == "after a write":
            write(one, *args)
        _end()

    with monkeypatch.context() as patched:
        patched.setattr(LogpStore, "write", counted)
        with pytest.raises(Killed):
            trainer.precompute()


def test_the_batch_size_of_a_pass(models: dict[str, str], tmp_path: Path) -> None:
    trainer = make("KTO", models["policy"], None, tmp_path)
    data = trainer.data.train
    rows, sizes = len(data.table), []
    three: dict[str, Any] = {"per_device_eval_batch_size": 3}
    for given in ({}, three, three | {"precompute_ref_batch_size": 2}):
        args = KTOConfig("out", per_device_train_batch_size=4, ref_placement="precomputed", **given)
        pass_: Any = precompute.ReferenceStores(SimpleNamespace(args=args, method=trainer.method), None)  # type: ignore[arg-type]
        plan = pass_._plan(data, np.roll(np.arange(rows), 1), range(rows), False)
        sizes.append(max(len(micro.rows) for ranks in plan.micro_batches for micro in ranks))
    assert sizes == [4, 3, 2]


def test_the_token_budget_of_a_pass(models: dict[str, str], tmp_path: Path) -> None:
    """It counts the tokens that are computed: the prompt of a pair once, if the reference packs it."""
    trainer = make("DPO", models["policy"], None, tmp_path)
    data = trainer.data.train
    tokens, alone = data.table.prompt + data.table.completions.sum(axis=1), np.full(len(data.table), -1)
    args = DPOConfig("out", ref_placement="precomputed", max_length=None, max_tokens_per_batch=int(tokens.sum()))
    pass_: Any = precompute.ReferenceStores(SimpleNamespace(args=args, method=trainer.method), None)  # type: ignore[arg-type]
    padded, shared = (pass_._plan(data, alone, range(len(tokens)), each).micro_batches for each in (False, True))
    assert len(shared) == 1 < len(padded)


def _end() -> None:
    raise Killed


@pytest.mark.ci
@pytest.mark.parametrize("where", ["before a write", "in a write", "after a write"])
def test_an_interrupted_pass_resumes(
    where: str, models: dict[str, str], tmp_path: Path, stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted twice, once with another batch size; the result equals that of an uninterrupted pass."""
    part, padded = random.Random(where).randint(2, 5), {"pack": "false"}  # rounding then depends on the batch size
    trainer = make("KTO", models["policy"], None, tmp_path, **padded)
    monkeypatch.setattr(precompute, "tokenized_folder", lambda: tmp_path / "whole" / "deepspeed-alignment")
    trainer.precompute()
    whole = stored(tmp_path / "whole" / "deepspeed-alignment")
    tokens = trainer.phases.records.pop("precompute").tokens
    monkeypatch.setattr(precompute, "tokenized_folder", lambda: tmp_path / "cache" / "deepspeed-alignment")
    interrupted(trainer, part, where, monkeypatch)
    done = stored(stores)
    assert sum(name.endswith(".safetensors") for name in done) == part - (where != "after a write")
    assert done.items() < whole.items()
    trainer.precompute()
    assert stored(stores) == whole
    if where != "after a write":
        return
    assert trainer.phases.records["precompute"].tokens == tokens, "no part was computed twice"
    shutil.rmtree(stores)
    interrupted(trainer, 2, where, monkeypatch)
    make("KTO", models["policy"], None, tmp_path, precompute_ref_batch_size=2, **padded).precompute()
    assert stored(stores).keys() == whole.keys()
    first, second = (values_of(trainer, folder) for folder in (tmp_path / "whole", tmp_path / "cache"))
    assert first != second
    np.testing.assert_allclose(first, second, rtol=1e-6)


def values_of(trainer: AlignmentTrainer, folder: Path) -> list[float]:
    """Return the log-probs of the training rows."""
    stores, data = trainer.engines.stores, trainer.data.train
    partners = set_partners(data.table, order_seed(trainer.args), draw=True)
    read = LogpStore(folder / "deepspeed-alignment", stores.key(data), partners, 2)
    assert read.read() == [] and read.missing == []
    return read.values.ravel().tolist()


# Refusals and messages ----------------------------------------------------------------------------------------------


def test_new_data_is_refused(models: dict[str, str], tmp_path: Path) -> None:
    """Rows of the constructor can be passed again."""
    trainer = make("DPO", models["policy"], None, tmp_path, max_steps=1, eval_strategy="no")
    with pytest.raises(OptionError, match="^eval_dataset: its reference log-probs are not precomputed"):
        trainer.evaluate(rows_of("DPO", 3, seed=5))
    trainer.close()


def test_unsupported_precomputation_is_refused(models: dict[str, str], tmp_path: Path) -> None:
    def endless() -> Iterator[dict[str, Any]]:
        while True:
            yield from unpaired_rows(4)

    args = alignment.KTOConfig(**options(tmp_path, ref_placement="precomputed", max_steps=2))
    stream = IterableDataset.from_generator(endless)
    with pytest.raises(OptionError, match=r"^ref_placement='precomputed': not supported for train_dataset, "):
        alignment.KTOTrainer(models["policy"], args=args, train_dataset=stream)
    trainer = alignment.KTOTrainer(models["policy"], args=args, train_dataset=unpaired_rows(4))
    with pytest.raises(OptionError, match=r"^ref_placement='precomputed': not supported for eval_dataset, "):
        trainer.evaluate(stream)
    assert trainer.engines.models is None

    class Silent(alignment.KTOTrainer):
        class method_class(alignment.KTOTrainer.method_class):  # noqa: N801
            reference_sequences = alignment.training.method.Method.reference_sequences

    with pytest.raises(OptionError, match="method_class does not define reference_sequences"):
        Silent(models["policy"], args=args, train_dataset=unpaired_rows(4))
    live = make("KTO", models["policy"], None, tmp_path, ref_placement=None)
    assert live.planned.engines.reference is not None and not live.planned.engines.reference.precomputed
    with pytest.raises(OptionError, match=r"^ref_placement=None: has nothing to precompute"):
        live.precompute()
