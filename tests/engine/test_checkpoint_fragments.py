"""Optimizer fragments with real engines: bitwise at the same split, up to rounding at any other, and errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fragment_runs import (
    BF16_LAYERS,
    LAYERS,
    Case,
    begin,
    continued,
    distance,
    engine,
    everything,
    fp16_on_cpu,
    masters,
    proceed,
    restore,
    save,
    train,
)
from pairwise import Combination, pairwise
from torch import Tensor

from alignment.checkpoint.fragments import Fragments, check_fragments, fragment_file, master_weights
from alignment.checkpoint.optimizer_state import (
    fragment_bytes,
    read_fragments,
    restore_group_settings,
    trained_names,
)
from alignment.checkpoint.tensors import TensorFile, write_tensors
from alignment.config.errors import CheckpointError
from alignment.engines.launch_env import init_distributed
from alignment.internals.deepspeed_state import inner_optimizer, state_units
from benchmarks import checkpoint as benchmark
from tools.ranks.client import RankServer

DRIVER = Path(__file__).parent.parent / "drivers" / "fragments.py"
FIRST, STEPS = 5, 4  # as in the driver
STAGES = ["0", "1", "2", "3"]
FACTORS = {
    "layout": [*LAYERS, *BF16_LAYERS],
    "dtype": ["fp32", "bf16", "fp16"],
    "optim": ["adamw_torch", "adamw_8bit", "sgd:momentum=0.9", "sgd", "adamw_torch:amsgrad=true,fused=false"],
    "more": ["", "/frozen", "/exported", "/exported/partly"],
}


def grid() -> list[str]:
    """Every pair of layout, number format, optimizer, and which parameters are frozen or in the model's files."""

    def text(chosen: Combination) -> str:
        return f"{chosen['layout']}/{chosen['dtype']}/{chosen['optim']}{chosen['more']}"

    def allowed(chosen: Combination) -> bool:
        return chosen["dtype"] == "bf16" or chosen["layout"] not in BF16_LAYERS

    return [text(chosen) for chosen in pairwise(FACTORS, allowed)]


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    init_distributed(use_cpu=True)
    with fp16_on_cpu():
        yield


# The same split -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "stage0/fp32/adamw_torch",
        "stage0/bf16/adamw_torch/frozen",
        "stage0/fp16/sgd:momentum=0.9",
        "stage2/fp32/adamw_8bit/exported",
        "stage0/fp32/sgd/exported/partly",
        "stage2/fp32/sgd/exported/partly",
        "stage2-offload/fp16/adamw_torch:amsgrad=true",
        "stage3-sub-groups/bf16/adamw_torch/frozen",
    ],
)
def test_continued_bitwise(text: str, tmp_path: Path) -> None:
    assert continued(Case.of(text), tmp_path / "saved", 3, 2) == []


@pytest.mark.ci
@pytest.mark.parametrize("text", grid())
def test_continued_bitwise_in_every_pair(text: str, tmp_path: Path) -> None:
    assert continued(Case.of(text), tmp_path / "saved", 3, 2) == []


@pytest.mark.parametrize(
    ("layout", "name"),
    [(layout, name) for layout in ("stage0", "stage2") for name in ("NAdam", "Adafactor", "RMSprop", "ASGD")]
    + [("stage0", "Adagrad")],  # with ZeRO, DeepSpeed's own reconstruction of it allows only one group
)
def test_the_users_own_optimizer(layout: str, name: str, tmp_path: Path) -> None:
    """With its own scalars (NAdam, ASGD), with factors of a matrix (Adafactor), with states from the start."""
    assert continued(Case(layout, "fp32", f"torch.{name}"), tmp_path / "saved", 3, 2) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_fused_adam_continues_bitwise(dtype: str, tmp_path: Path) -> None:
    """At stage 0 in 16 bits it has a separate wrapper."""
    assert continued(Case("stage0", dtype, "deepspeed_fused_adam"), tmp_path / "saved", 3, 2) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["stage2", "stage2-offload", "stage3-offload"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_compiled_adam_continues_bitwise(layout: str, dtype: str, tmp_path: Path) -> None:
    """After 40 steps, its running products of the betas differ from the results of `pow`."""
    assert continued(Case(layout, dtype, "deepspeed_cpu_adam"), tmp_path / "saved", 40, 2) == []


@pytest.mark.parametrize("optim", ["adamw_8bit", "lion_32bit", "rmsprop", "sgd:momentum=0.9,nesterov=true"])
def test_the_same_updates_at_every_stage(optim: str, tmp_path: Path) -> None:
    """8-bit states are rounded in blocks, which are placed differently at each stage."""
    found = {}
    for stage in ("stage0", "stage2", "stage3"):
        policy = engine(Case(stage, optim=optim), tmp_path)
        before = masters(policy)
        train(policy, 0, 3)
        found[stage] = torch.cat([value - before[name] for name, value in sorted(masters(policy).items())])
        policy.close()
    whole = found.pop("stage0")
    for stage, update in found.items():
        error = float((update - whole).norm() / whole.norm())
        assert error < (0.05 if optim == "adamw_8bit" else 1e-3), (stage, error)


def test_an_engine_that_has_made_steps_is_reset(tmp_path: Path) -> None:
    policy = engine(Case("stage2"), tmp_path)
    train(policy, 0, 2)
    beside, wanted = save(policy, tmp_path), everything(policy)
    train(policy, 2, 2)
    assert not torch.equal(everything(policy)["0.exp_avg"], wanted["0.exp_avg"])
    restore(policy, tmp_path, beside)
    found = everything(policy)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    policy.close()


def test_before_the_first_step_there_are_no_states(tmp_path: Path) -> None:
    policy = engine(Case("stage2"), tmp_path)
    beside = save(policy, tmp_path)
    wanted = everything(policy)
    train(policy, 0, 1)
    restore(policy, tmp_path, beside)
    assert everything(policy).keys() == wanted.keys()
    policy.close()


@pytest.mark.parametrize("text", ["stage0/fp32/adamw_torch", "stage2/bf16/adamw_8bit", "stage3/fp32/sgd/exported"])
def test_the_size_is_known_before_the_first_step(text: str, tmp_path: Path) -> None:
    case = Case.of(text)
    policy = engine(case, tmp_path)
    exported = list(trained_names(policy.scorer.model).values()) if case.exported else []
    wanted = everything(policy)
    early = fragment_bytes(policy, exported)
    found = everything(policy)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    train(policy, 0, 1)
    late = fragment_bytes(policy, exported)
    save(policy, tmp_path, case.exported)
    size = (tmp_path / fragment_file(0, 1)).stat().st_size
    assert early == pytest.approx(size, rel=0.1, abs=2000) and late == pytest.approx(size, abs=1500)
    policy.close()


# Another split ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), ["02", "20", "31"])
def test_another_stage(source: str, target: str, tmp_path: Path) -> None:
    begin(Case(f"stage{source}"), tmp_path / "source", FIRST, STEPS)
    wanted = begin(Case(f"stage{target}"), tmp_path / "target", FIRST, STEPS)
    assert distance(proceed(Case(f"stage{target}"), tmp_path / "source", FIRST, STEPS), wanted) < 1e-4


@pytest.mark.ci
def test_two_ranks(ranks: RankServer, tmp_path: Path) -> None:
    """A sample of the next test."""
    texts = ["stage2-round-robin/bf16/adamw_8bit", "stage1-fp32-accumulation/bf16/adamw_torch/frozen"]
    jobs = tmp_path / "jobs.json"
    jobs.write_text(json.dumps({"continued": texts, "stages": ["0", "2-round-robin", "3"], "sources": []}))
    ranks.run(DRIVER, tmp_path, jobs, timeout=200)
    results = json.loads((tmp_path / "results.json").read_text())
    found = results.pop("pairs")
    assert results == dict.fromkeys(texts, [])
    assert len(found) == 6 and all(off < 1e-4 for off in found.values())


@pytest.mark.ci
def test_ranks_and_stages(ranks: RankServer, tmp_path: Path) -> None:
    """From every (ranks, stage) to every other one, 56 pairs; two ranks continue bitwise in every pair."""
    wanted = {stage: begin(Case(f"stage{stage}"), tmp_path / f"1-{stage}", FIRST, STEPS) for stage in STAGES}
    jobs = tmp_path / "jobs.json"
    texts = grid()
    jobs.write_text(json.dumps({"continued": texts, "stages": STAGES, "sources": [f"1-{s}" for s in STAGES]}))
    ranks.run(DRIVER, tmp_path, jobs, timeout=400)
    results = json.loads((tmp_path / "results.json").read_text())
    found = results.pop("pairs")
    assert {text: names for text, names in results.items() if names} == {} and set(results) == set(texts)
    for stage, update in wanted.items():
        for source in [f"{world}-{other}" for world in (1, 2) for other in STAGES]:
            if source != f"1-{stage}":
                made = proceed(Case(f"stage{stage}"), tmp_path / source, FIRST, STEPS)
                found[f"{source} to 1-{stage}"] = distance(made, update)
    assert len(found) == 56
    assert {pair: off for pair, off in found.items() if not off < 1e-4} == {}


def rewritten(path: Path, changes: dict[str, str], **replaced: Tensor) -> None:
    """Rewrite a file with other text in its index, or other tensors."""
    with TensorFile(path) as file:
        metadata, tensors = dict(file.metadata), {name: file.read(name) for name in file.keys()}
    tensors |= replaced
    for change, into in changes.items():
        assert change in metadata["fragments"]
        metadata["fragments"] = metadata["fragments"].replace(change, into, 1)
    write_tensors(path, tensors, metadata)


def test_scalars_that_are_merged(tmp_path: Path) -> None:
    """The largest step count is used; all other values must agree."""
    policy = engine(Case("stage0", optim="torch.NAdam"), tmp_path)
    train(policy, 0, 3)
    save(policy, tmp_path)
    policy.close()
    policy = engine(Case("stage2", optim="torch.NAdam"), tmp_path, seed=1)
    path = tmp_path / fragment_file(0, 1)
    rewritten(path, {}, **{"unit-1.step": torch.tensor(1.0)})
    read_fragments(policy, tmp_path)
    assert {name: float(value) for name, value in everything(policy).items() if name.endswith("step")} == {
        "0.step": 3.0,
        "1.step": 3.0,
    }
    rewritten(path, {}, **{"unit-1.mu_product": torch.tensor(0.5)})
    with pytest.raises(CheckpointError, match="torch.NAdam stores 'mu_product' per tensor, but ZeRO stage 2"):
        read_fragments(policy, tmp_path)
    policy.close()


def test_parameters_without_gradients_have_zero_states(tmp_path: Path) -> None:
    policy = engine(Case("stage0"), tmp_path)
    train(policy, 0, 2)
    unit = state_units(policy.engine)[1]
    name = trained_names(policy.scorer.model)[unit.pieces[0].parameter]
    inner_optimizer(policy.engine).state.pop(unit.master)
    save(policy, tmp_path)
    policy.close()
    policy = engine(Case("stage2"), tmp_path, seed=1)
    train(policy, 0, 1)  # states that must be overwritten
    read_fragments(policy, tmp_path)
    names = trained_names(policy.scorer.model)
    for unit in state_units(policy.engine):
        moments = inner_optimizer(policy.engine).state[unit.master]["exp_avg_sq"]
        for piece in unit.pieces:
            part = moments[piece.offset : piece.offset + piece.numel]
            assert bool(part.any()) == (names[piece.parameter] != name)
    policy.close()


def test_states_of_8_bits_fit_their_own_split_only(tmp_path: Path) -> None:
    policy = engine(Case("stage2", optim="adamw_8bit"), tmp_path)
    train(policy, 0, 1)
    beside = save(policy, tmp_path)
    policy.close()
    policy = engine(Case("stage3-sub-groups", optim="adamw_8bit"), tmp_path, seed=1)
    before = everything(policy)
    with pytest.raises(
        CheckpointError, match="bitsandbytes.AdamW were saved with ZeRO stage 2 on 1 rank and .* stage 3"
    ):
        restore(policy, tmp_path, beside)
    after = everything(policy)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    policy.close()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_masters_without_an_engine(dtype: str, tmp_path: Path) -> None:
    policy = engine(Case("stage3-sub-groups", dtype), tmp_path)
    train(policy, 0, 1)
    save(policy, tmp_path)
    wanted, found = masters(policy), dict(master_weights(tmp_path))
    assert list(found) == sorted(wanted)
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor.view(-1), wanted[name]), name
    save(policy, tmp_path, exported=True)
    assert list(master_weights(tmp_path)) == [] or dtype == "bf16"
    policy.close()


@pytest.mark.ci
def test_the_peak_memory_of_a_load(tmp_path: Path) -> None:
    assert benchmark.measure({"megabytes": 500, "stage": 3, "dtype": "bf16", "folder": str(tmp_path)}) <= 1.10


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, one_rank: None) -> Path:
    """Fragments of stage 2, named like two files."""
    folder = tmp_path_factory.mktemp("saved")
    policy = engine(Case("stage2"), folder)
    train(policy, 0, 1)
    save(policy, folder)
    policy.close()
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize(
    ("change", "into", "said"),
    [
        ('"format":1', '"format":2', "format 2 is newer than 1"),
        ('"ranks":1', '"ranks":2', "is file 1 of 2, not 1 of 1 as expected"),
        ('"format":1', '"formal":1', "the index cannot be read"),
        ('"states":{"step":"scalar",', '"states":{', "is not in the index"),
        ('"states":{"step":"scalar",', '"states":{"stop":"scalar",', "unit-0.stop is missing"),
        ('"pieces":[["model.embed_tokens.weight",0,', '"pieces":[["model.embed_tokens.weight",1,', "does not fit"),
    ],
)
def test_a_file_whose_index_is_wrong(copied: Path, change: str, into: str, said: str) -> None:
    check_fragments(copied)
    rewritten(copied / fragment_file(0, 1), {change: into})
    with pytest.raises(CheckpointError, match=said) as caught:
        check_fragments(copied)
    assert str(copied) in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_missing_or_too_many(copied: Path) -> None:
    with pytest.raises(CheckpointError, match="optimizer-00001-of-00002.safetensors: missing"):
        check_fragments(copied, ranks=2)
    with pytest.raises(CheckpointError, match="no optimizer state"):
        check_fragments(copied / "nowhere")
    shutil.copy(copied / fragment_file(0, 1), copied / fragment_file(1, 2))
    with pytest.raises(CheckpointError, match=r"of different numbers of ranks \(1, 2\)"):
        check_fragments(copied)
    (copied / fragment_file(0, 1)).unlink()
    with pytest.raises(CheckpointError, match="optimizer-00001-of-00002.safetensors: missing"):
        check_fragments(copied)


def test_a_truncated_file(copied: Path) -> None:
    path = copied / fragment_file(0, 1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"optimizer-00001-of-00001.safetensors: \d+ bytes instead of"):
        check_fragments(copied)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stage2/fp32/sgd", "contains the states of torch.AdamW, but this run uses torch.SGD"),
        ("stage2/fp32/adamw_torch/frozen", "model.embed_tokens.weight was trained, but this run does not train it"),
    ],
)
def test_another_run(saved: Path, tmp_path: Path, text: str, said: str) -> None:
    policy = engine(Case.of(text), tmp_path, seed=1)
    before = everything(policy)
    with pytest.raises(CheckpointError, match=said):
        read_fragments(policy, saved)
    assert all(torch.equal(tensor, before[name]) for name, tensor in everything(policy).items())
    policy.close()


def test_more_is_trained_than_before(tmp_path: Path) -> None:
    policy = engine(Case("stage2", frozen=True), tmp_path)
    save(policy, tmp_path)
    policy.close()
    policy = engine(Case("stage2"), tmp_path)
    with pytest.raises(CheckpointError, match=r"is not in the checkpoint, but \[\d+, \d+\] in this run"):
        read_fragments(policy, tmp_path)
    with pytest.raises(CheckpointError, match="has 1 parameter groups, but the optimizer has 2"):
        restore_group_settings(policy, [{}])
    policy.close()


def test_missing_master_weights(tmp_path: Path) -> None:
    policy = engine(Case("stage2"), tmp_path)
    save(policy, tmp_path, exported=True)
    with pytest.raises(CheckpointError, match="are in neither the optimizer's nor the model's files"):
        read_fragments(policy, tmp_path)
    policy.close()


def test_pieces_that_do_not_cover_a_parameter(copied: Path) -> None:
    with Fragments(copied) as fragments:
        piece = fragments.pieces("model.embed_tokens.weight")[0].piece
    saved_as = json.dumps(list(piece)).replace(" ", "")
    rewritten(copied / fragment_file(0, 1), {saved_as: f'["{piece.name}",0,0,5]'})
    with pytest.raises(CheckpointError, match="contains only 5 of the 1431 elements of model.embed_tokens.weight"):
        check_fragments(copied)
