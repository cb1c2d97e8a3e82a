"""References with an engine of their own: layers that are gathered as a whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DRIVERS
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import z3_leaf_module
from support.helpers import make_model, options, tiny_config, unpaired_rows
from support.split_runs import run as split_run
from transformers import AutoModelForCausalLM, PreTrainedModel

import alignment
from alignment.config import deepspeed as deepspeed_config
from alignment.config.errors import ModelError
from alignment.engines.phases import Phases
from alignment.engines.scoring import FrozenEngine
from alignment.models.partitioning import decoder_layers
from alignment.references import engine as references
from alignment.references.base import RowIds
from alignment.training.method import Models, Window
from tools.ranks import RankServer

pytestmark = pytest.mark.usefixtures("own_process_group")


def built(folder: Path, placement: str, config: Any = None, **more: Any) -> tuple[Any, Any, RowIds]:
    """A reference with a separate engine, a batch, and its rows."""
    model, reference = make_model(folder / "model"), make_model(folder / "reference", "untied", seed=1, layers=3)
    if config is not None:
        AutoModelForCausalLM.from_config(config).save_pretrained(reference)
    args = alignment.KTOConfig(**options(folder, ref_placement=placement, **more))
    trainer = alignment.KTOTrainer(model, reference, args=args, train_dataset=unpaired_rows(4))
    data, plan = trainer.data.train, trainer.planned.engines.reference
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


@pytest.mark.parametrize("placement", ["sharded", "offload"])
def test_the_whole_next_layer_is_fetched_while_one_computes(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a layer of 28 h^2 parameters, of which "auto" fetched 12 h^2 before; and at most one further weight."""
    monkeypatch.setattr(deepspeed_config, "_LEAST_BUCKET", 0)
    keys = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **dict.fromkeys(keys, "auto")}
    if placement == "offload":
        zero["offload_param"] = {"device": "cpu"}
    config = tiny_config("untied", 7)
    config.intermediate_size = 8 * config.hidden_size
    reference, batch, ids = built(tmp_path, placement, config, ref_deepspeed={"zero_optimization": zero})
    model = reference.engine.scorer.model
    layers, found = decoder_layers(model), []

    def look(layer: torch.nn.Module, *_: Any) -> None:
        number = layers.index(layer)
        found.append([[status(p) for p in each.parameters()] for each in layers[number : number + 3]])

    def status(parameter: Any) -> str:
        return str(parameter.ds_status.name)

    for _ in range(2):  # DeepSpeed learns the order of the layers
        reference.sequence_logps(batch.joint, ids)
    for layer in layers:
        layer.register_forward_pre_hook(look)
    reference.sequence_logps(batch.joint, ids)
    assert {status(p) for layer in layers for p in layer.parameters()} == {"NOT_AVAILABLE"}, "none are kept"
    assert len(found) == len(layers)
    for own, *ahead in found:
        assert {*own} == {"AVAILABLE"}
        assert all("NOT_AVAILABLE" not in following for following in ahead[:1])
        assert all(after.count("NOT_AVAILABLE") >= len(own) - 1 for after in ahead[1:])
    reference.close()


@pytest.mark.parametrize(
    ("placement", "pack", "together", "passes"),
    [("offload", "auto", 2, 3), ("sharded", "false", 3, 2), ("offload", "false", 9, 1), ("replica", "auto", 2, 5)],
)
def test_micro_batches_of_a_reference_that_share_a_pass(
    placement: str, pack: str, together: int, passes: int, tmp_path: Path
) -> None:
    """Replicas have nothing to transfer. The mismatched completions of KTO are in the same passes."""
    model, reference = (make_model(tmp_path / name, seed=seed) for name, seed in (("model", 0), ("reference", 1)))
    more = {"ref_placement": placement, "pack": pack, "gradient_accumulation_steps": 5}
    args = alignment.KTOConfig(**options(tmp_path, **more))
    trainer = alignment.KTOTrainer(model, reference, args=args, train_dataset=unpaired_rows(20))
    data, plan = trainer.data.train, trainer.data.sampler.plan(0, 0)
    batches: list[Any] = [trainer.method.kind.collate(data.dataset, plan, micro, 0) for micro in range(5)]
    built = trainer.planned.engines.reference.build(args)
    calls: list[int] = []
    built.engine.scorer.register_forward_pre_hook(lambda *_: calls.append(1))
    models: Any = Models(None, built)  # type: ignore[arg-type]

    def asked(several: int, tokens: bool, rehearses: bool = False) -> list[torch.Tensor]:
        calls.clear()
        sums: Any = None
        phases = Phases(built.engine.device)
        window = Window(batches, plan.counts, models, sums, phases, data.key, several, rehearses)
        found = window.reference_logps(trainer.method.reference_sequences, tokens=tokens)
        assert phases.records["reference"].tokens == sum(batch.joint.tokens for batch in batches)
        return found

    for tokens in (False, True):
        single = asked(1, tokens)
        assert len(calls) == 5
        for rehearses in (False, True):
            several = asked(together, tokens, rehearses)
            assert len(calls) == passes
            for one, other, batch in zip(single, several, batches, strict=True):
                assert len(one) == len(batch.joint.targets if tokens else batch.joint.lengths)
                torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-5 if not tokens else 1e-6)
    trainer.close()
    built.close()


@pytest.mark.ci
def test_two_ranks_share_passes(tmp_path: Path, ranks: RankServer) -> None:
    """Also in the last window and in an evaluation, where a rank has micro-batches without rows."""
    models = {name: make_model(tmp_path / name, seed=seed) for name, seed in (("tied", 0), ("reference", 1))}
    runs = []
    for method, placement in (("KTO", "offload"), ("DPO", "sharded"), ("OnlineDPO", "offload")):
        for together in (1, 3):
            run = split_run(f"{method}-{together}", method, models, "stage2", 1, 4, folder=str(tmp_path))
            run["args"]["ref_placement"] = placement
            runs.append(run | {"together": together, "eval": run["train"][:7]})
    (tmp_path / "spec.json").write_text(json.dumps(runs))
    done = ranks.run(DRIVERS / "runs.py", tmp_path / "spec.json", timeout=300)
    assert done.stdout.count("reference: 3 micro-batches in a forward pass") == 3
    for first, second in zip(runs[::2], runs[1::2]):
        single, several = (
            json.loads((tmp_path / f"{each['name']}.json").read_text())["log"] for each in (first, second)
        )
        assert len(single) == len(several) > 2
        for own, other in zip(single, several):
            timed = ("runtime", "per_second", "time", "memory", "bytes")
            names = [name for name, value in own.items() if type(value) is float and not any(t in name for t in timed)]
            assert {name: own[name] for name in names} == pytest.approx(
                {name: other[name] for name in names}, rel=1e-5, abs=1e-6
            ), first["name"]


def test_inputs_that_cannot_be_padded_are_not_merged(tmp_path: Path) -> None:
    reference, batch, ids = built(tmp_path, "sharded")
    joint = batch.joint
    count, width = joint.inputs["input_ids"].shape
    further = replace(joint, inputs=joint.inputs | {"position_ids": torch.arange(width).expand(count, width)})
    alone = reference.sequence_logps(joint, ids)
    for found in reference.logps_of_each([further, further], tokens=False):
        torch.testing.assert_close(found, alone, rtol=1e-6, atol=1e-5)
    reference.close()


def test_a_live_model_is_unchanged_if_its_engine_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "reference", seed=1))
    args = alignment.KTOConfig(**options(tmp_path, ref_placement="sharded"))
    trainer = alignment.KTOTrainer(make_model(tmp_path / "model"), live, args=args, train_dataset=unpaired_rows(4))
    plan = trainer.planned.engines.reference

    def failing(engine: FrozenEngine, *args: Any, **kwargs: Any) -> Any:
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
