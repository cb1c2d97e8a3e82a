"""References through their interface, which is sufficient to replace a model with a store of log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import z3_leaf_module
from support.helpers import make_model, options, paired_rows, unpaired_rows
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import alignment
from alignment.config.errors import ModelError
from alignment.data.batching import Batch
from alignment.engines.scoring import FrozenEngine
from alignment.models.partitioning import decoder_layers
from alignment.references import engine as references
from alignment.references.base import RowIds
from alignment.references.engine import EngineReference, ReferencePlan
from alignment.training.trainer import AlignmentTrainer

pytestmark = pytest.mark.usefixtures("own_process_group")
Key = tuple[str, int, int]


def keys(count: int, ids: RowIds) -> list[Key]:
    """Return a key for each of ``count`` sequences: dataset, row, and which completion follows its prompt."""
    partnered = [(row, partner) for row, partner in zip(ids.rows, ids.partners) if partner >= 0]
    own = count - len(partnered)
    completions = own // len(ids.rows) if ids.rows else 0
    found = [(ids.dataset, row, -1 - number) for number in range(completions) for row in ids.rows]
    return found + [(ids.dataset, row, partner) for row, partner in partnered]


class Recorder:
    """An engine whose results are recorded."""

    def __init__(self, engine: EngineReference, store: dict[Key, Tensor]) -> None:
        self.engine, self.store = engine, store

    def sequence_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        found = self.engine.sequence_logps(batch, ids)
        self.store |= zip(keys(len(found), ids), found.unbind(), strict=True)
        return found

    def close(self) -> None:
        self.engine.close()


class Store:
    """Returns recorded results without a model."""

    def __init__(self, store: dict[Key, Tensor]) -> None:
        self.store = store

    def sequence_logps(self, batch: Batch, ids: RowIds) -> Tensor:
        found = [self.store[key] for key in keys(len(batch.lengths), ids)]
        return torch.stack(found) if found else torch.zeros(0)

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("method", ["KTO", "DPO"])
def test_a_store_replaces_the_model(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked up by row, by partner and by completion, also if the window is split differently."""
    model, reference = make_model(tmp_path / "model"), make_model(tmp_path / "reference", seed=1)
    rows = unpaired_rows(10) if method == "KTO" else paired_rows(10)
    held = unpaired_rows(3, seed=5) if method == "KTO" else paired_rows(3, seed=5)
    build, store, logs = ReferencePlan.build, {}, []

    def trained(name: str, **more: Any) -> AlignmentTrainer:
        args = getattr(alignment, f"{method}Config")(
            **{**options(tmp_path / name, num_train_epochs=1, eval_strategy="epoch", optim="sgd"), **more}
        )
        trainer: AlignmentTrainer = getattr(alignment, f"{method}Trainer")(
            model, reference, args=args, train_dataset=rows, eval_dataset=held
        )
        trainer.train()
        trainer.close()
        return trainer

    monkeypatch.setattr(ReferencePlan, "build", lambda plan, args: Recorder(build(plan, args), store))
    logs.append(trained("recorded").state.log_history)
    assert len({key[0] for key in store}) == 2, "rows of the two datasets have names of their own"
    partners = {row: partner for _, row, partner in store if partner >= 0}
    assert bool(partners) == (method == "KTO") and all(row != partner for row, partner in partners.items())
    monkeypatch.setattr(ReferencePlan, "build", lambda plan, args: Store(store))
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "per_device_eval_batch_size": 2}
    logs.append(trained("looked-up", **split).state.log_history)
    for engine, looked_up in zip(*logs, strict=True):
        for name in ("loss", "kl", "grad_norm", "rewards/chosen", "eval_loss", "eval_rewards/margins"):
            assert (name in engine) == (name in looked_up)
            assert looked_up.get(name, 0.0) == pytest.approx(engine.get(name, 0.0), rel=1e-4, abs=1e-6), name


def test_a_reference_needs_no_policy(tmp_path: Path) -> None:
    """Build, use and release it alone: the policy then has the device to itself."""
    model, reference = make_model(tmp_path / "model"), make_model(tmp_path / "reference", seed=1)
    args = alignment.KTOConfig(**options(tmp_path))
    trainer = alignment.KTOTrainer(model, reference, args=args, train_dataset=unpaired_rows(4))
    plan, data = trainer.planned.engines.reference, trainer.data.train
    assert (
        plan is not None and data is not None and trainer.data.sampler is not None and trainer.engines.models is None
    )
    window = trainer.data.sampler.plan(0, 0)
    batch: Any = trainer.method.kind.collate(data.dataset, window, 0, 0)
    alone = plan.build(args)
    ids = RowIds(data.key, batch.rows, batch.partners)
    sums, tokens = alone.sequence_logps(batch.joint, ids), alone.token_logps(batch.joint, ids)
    alone.close()
    assert trainer.engines.models is None
    torch.testing.assert_close(torch.zeros_like(sums).index_add(0, batch.joint.segments, tokens), sums)
    trainer.engines.build(1)
    assert trainer.engines.models is not None
    torch.testing.assert_close(trainer.engines.models.reference.sequence_logps(batch.joint, ids), sums)
    trainer.close()


def built(folder: Path, placement: str, **more: Any) -> tuple[Any, Any, RowIds]:
    """A reference with a separate engine, a batch, and its rows."""
    model, reference = make_model(folder / "model"), make_model(folder / "reference", "untied", seed=1, layers=3)
    args = alignment.KTOConfig(**options(folder, ref_placement=placement, **more))
    trainer = alignment.KTOTrainer(model, reference, args=args, train_dataset=unpaired_rows(4))
    data, plan = trainer.data.train, trainer.planned.engines.reference
    assert data is not None and trainer.data.sampler is not None and isinstance(plan, ReferencePlan)
    batch: Any = trainer.method.kind.collate(data.dataset, trainer.data.sampler.plan(0, 0), 0, 0)
    return plan.build(args), batch, RowIds(data.key, batch.rows, batch.partners)


def leaves_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


@pytest.mark.parametrize("placement", ["sharded", "offload"])
def test_leaf_layers_give_bitwise_equal_results(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches: list[torch.nn.Module] = []
    fetch = PartitionedParameterCoordinator.fetch_sub_module

    def counted(self: Any, module: torch.nn.Module, forward: bool) -> None:
        fetches.append(module)
        fetch(self, module, forward)

    monkeypatch.setattr(PartitionedParameterCoordinator, "fetch_sub_module", counted)
    found, counts = [], []
    for marks in (True, False):
        with monkeypatch.context() as patched:
            if not marks:
                patched.setattr(references, "mark_leaves", lambda *_: [])
            reference, batch, ids = built(tmp_path / str(marks), placement)
        model = reference.engine.scorer.model
        assert leaves_of(model) == (decoder_layers(model) if marks else [])
        layer = [p for p in decoder_layers(model)[0].parameters() if hasattr(p, "ds_z3_leaf_module")]
        assert len(layer) == (len(list(decoder_layers(model)[0].parameters())) if marks else 0)
        fetches.clear()
        found += [reference.sequence_logps(batch.joint, ids) for _ in range(2)]
        counts.append(len(fetches))
        reference.close()
        assert not leaves_of(model)
        assert not any(hasattr(p, "ds_z3_leaf_module") for p in model.parameters()), "forget_leaf has seen to it"
    assert all(torch.equal(found[0], one) for one in found[1:])
    assert 3 * counts[0] < counts[1], counts


def test_a_live_model_is_unchanged_if_its_engine_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "reference", seed=1))
    args = alignment.KTOConfig(**options(tmp_path, ref_placement="sharded"))
    trainer = alignment.KTOTrainer(make_model(tmp_path / "model"), live, args=args, train_dataset=unpaired_rows(4))
    plan = trainer.planned.engines.reference
    assert isinstance(plan, ReferencePlan)

    def failing(engine: FrozenEngine, task: Any) -> Any:
        assert leaves_of(engine.scorer.model)
        engine.close()
        raise ModelError("its scores are not its own")

    monkeypatch.setattr(references, "checked", failing)
    with pytest.raises(ModelError, match="not its own"):
        plan.build(args)
    assert not leaves_of(live) and not any(hasattr(p, "ds_z3_leaf_module") for p in live.parameters())


def test_a_layer_above_max_live_parameters_is_not_a_leaf(tmp_path: Path) -> None:
    least = {"stage": 3, "stage3_max_live_parameters": 1000, "stage3_param_persistence_threshold": 0}
    reference, batch, ids = built(tmp_path, "sharded", ref_deepspeed={"zero_optimization": least})
    assert not leaves_of(reference.engine.scorer.model)
    assert reference.sequence_logps(batch.joint, ids).isfinite().all()
    reference.close()
