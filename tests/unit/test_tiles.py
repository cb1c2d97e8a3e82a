"""Tiles of the log-prob head: memory passes, Triton kernels compared with torch operations and float64, the choice.

Without a GPU, the kernels run on CPU tensors in Triton's interpreter (``conftest.py``). With a GPU, they are compiled.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import DRIVERS, ROOT
from support.head_problems import TRANSFORMS, dense, dense_stats, problem
from torch import Tensor

from alignment.config.errors import OptionError
from alignment.engines import scoring
from alignment.engines.scoring import checked
from alignment.models import logprobs
from alignment.models.logprobs import token_logprobs
from alignment.models.tiles import choice, plain, products
from alignment.models.tiles.products import LogitTransform
from benchmarks.passes import Passes, passes, products_as_on_a_gpu
from tools.ranks import RankServer

pytest.importorskip("triton", reason="triton is not installed")
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_interpreter = pytest.mark.skipif(HERE.type == "cuda", reason="the interpreter is for CPU tensors")
INF, NAN = float("inf"), float("nan")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute tiles with the kernels."""
    monkeypatch.setenv(choice.VARIABLE, "triton")


@pytest.fixture(autouse=True)
def unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the choice made by other tests, and use a group whose ranks have no GPU."""
    monkeypatch.setattr(choice, "_settled", {})
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)


# Passes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "more", "expected"),
    [
        (torch.float32, {}, (9, 6)),
        (torch.bfloat16, {}, (8.5, 5.5)),
        (torch.float16, {}, (8.5, 5.5)),
        (torch.bfloat16, {"transform": LogitTransform(scale=0.5)}, (12.5, 9.5)),
        (torch.bfloat16, {"stats": False}, (7.5, 5.5)),
    ],
)
def test_passes_of_torch_operations(dtype: torch.dtype, more: dict[str, Any], expected: tuple[float, float]) -> None:
    assert passes("torch", dtype, **more) == expected


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.ci)])
def test_passes_of_the_kernels(dtype: torch.dtype) -> None:
    """A cap, a scale and statistics add no passes, except for one value per row."""
    for transform in (LogitTransform(), LogitTransform(0.5, 30.0)):
        found = passes("triton", dtype, transform=transform)
        most = Passes(3, 2) if dtype == torch.float32 else Passes(2.5, 1.5)
        assert all(bound <= count < bound + 0.01 for count, bound in zip(found, most)), found


# Numbers -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu_products() -> Iterator[None]:
    """Simulate a GPU's products of 16-bit matrices."""
    if HERE.type == "cuda":
        yield
        return
    with products_as_on_a_gpu():
        yield


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BOUNDS = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 1e-3}  # relative error of a gradient
CASES = [("fp32", "plain", False), ("fp32", "scaled", True), ("fp32", "capped", False), ("fp32", "both", True)]
CASES += [(kind, name, bias) for kind in ("bf16", "fp16") for name, bias in (("plain", False), ("both", True))]


def inputs(
    dtype: torch.dtype, bias: bool, tokens: int, vocabulary: int
) -> tuple[list[Tensor | None], list[Tensor | None], Tensor, Tensor]:
    """Return hidden states, weight and bias in dtype and in float64, targets, gradients of the log-probs."""
    hidden, weight, offset, targets, upstream = problem(tokens, 24, vocabulary, bias)
    given = [None if t is None else t.to(HERE, dtype).requires_grad_() for t in (hidden, weight, offset)]
    wide = [None if t is None else t.detach().double().requires_grad_() for t in given]
    return given, wide, targets.to(HERE), upstream.to(HERE)


def compare(
    given: list[Tensor | None],
    wide: list[Tensor | None],
    targets: Tensor,
    upstream: Tensor,
    transform: LogitTransform,
    bound: float,
    **more: Any,
) -> logprobs.TokenStats:
    """Compare values and gradients of log-probs with those in float64; return the statistics."""
    expected = dense(*wide, targets, transform)
    expected.backward(upstream.double())
    found, stats = token_logprobs(*given, targets, transform, stats=True, **more)
    found.backward(upstream)
    assert found.dtype == torch.float32 and stats is not None
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(given, wide):
        if ours is not None:
            assert float((ours.grad - theirs.grad).norm() / theirs.grad.norm()) < bound
    return stats


@pytest.mark.ci
@pytest.mark.usefixtures("kernels", "gpu_products")
@pytest.mark.parametrize(("kind", "name", "bias"), CASES)
def test_the_kernels_against_dense_float64(kind: str, name: str, bias: bool) -> None:
    """Two tiles in the forward pass, with rows of two blocks, and three vocabulary slices in the backward pass."""
    given, wide, targets, upstream = inputs(DTYPES[kind], bias, 18, 4500)
    targets[:9] = (wide[0] @ wide[1].T).argmax(1)[:9]
    stats = compare(given, wide, targets, upstream, TRANSFORMS[name], BOUNDS[kind], tile_bytes=2**10)
    assert not any(part.requires_grad for part in stats)
    measured = dense_stats(*(None if t is None else t.detach() for t in given), targets, TRANSFORMS[name])
    torch.testing.assert_close(torch.stack(tuple(stats)).double(), measured, rtol=1e-5, atol=2e-5)


@pytest.mark.usefixtures("gpu_products")
@pytest.mark.parametrize(("kind", "name", "bias"), CASES)
def test_torch_operations_with_products_as_on_a_gpu(kind: str, name: str, bias: bool) -> None:
    compare(*inputs(DTYPES[kind], bias, 60, 333), TRANSFORMS[name], BOUNDS[kind], tile_bytes=2**10)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_small_tile_with_the_kernels(dtype: torch.dtype) -> None:
    """The comparison before the first step of a run on a GPU."""
    assert choice.trial(choice.fused_tiles(), HERE, dtype) is None


@pytest.mark.parametrize("broken", range(8))
def test_a_small_tile_detects_errors(broken: int) -> None:
    """An error in the last entry only."""

    def spoiled(outputs: list[Tensor], first: int) -> list[Tensor]:
        copies = [output.clone() for output in outputs]
        for number, copy in enumerate(copies, first):
            if number == broken:
                copy.view(-1)[-1] += 0.1 * copy.float().abs().max() + 0.1
        return copies

    def score_tile(*arguments: Any) -> plain.TileScores:
        scored = plain.score_tile(*arguments)
        assert scored.jacobian is not None and scored.stats is not None
        logps, lse, rows, *stats = spoiled([scored.logps, scored.lse, scored.jacobian, *scored.stats], 0)
        return plain.TileScores(logps, lse, rows, torch.stack(stats))

    def head_coefficients(*arguments: Any) -> tuple[Tensor, Tensor]:
        found, sums = plain.head_coefficients(*arguments)
        assert sums is not None
        found, sums = spoiled([found, sums], 6)
        return found, sums

    reason = choice.trial(choice.Tiles(score_tile, head_coefficients), HERE, torch.bfloat16)
    assert reason is not None and reason.startswith(f"{choice._OUTPUTS[broken]} of a small tile differ by")


@pytest.mark.ci
def test_a_vocabulary_of_262144(kernels: None) -> None:
    given, wide, targets, upstream = inputs(torch.float32, False, 3, 262144)
    targets[0] = 262143
    # The fp32 product sums 262144 entries with errors up to 5e-5.
    compare(given, wide, targets, upstream, LogitTransform(), 1e-4)


ROWS_OF_EXTREMES = {
    "masked": lambda row: row.index_fill_(0, torch.arange(1, 4990, device=HERE), -INF),
    "the first block masked": lambda row: row[:4096].fill_(-INF),
    "all masked": lambda row: row.fill_(-INF),
    "the target masked": lambda row: row[7:8].fill_(-INF),
    "infinite": lambda row: row[4999:].fill_(INF),
    "the target infinite": lambda row: row[7:8].fill_(INF),
    "nan": lambda row: row[4500:4501].fill_(NAN),
    "large": lambda row: row.mul_(1e4),
    "huge": lambda row: row.fill_(3e38),
}


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's warnings, in the interpreter
@pytest.mark.parametrize("name", ["plain", "both"])
def test_infinite_logits_and_nan_match_torch_operations(name: str) -> None:
    """Infinite logits come from the bias, because a product with infinite factors would be NaN everywhere."""
    from alignment.models.tiles import fused

    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 4, device=HERE), torch.randn(5000, 4, device=HERE)
    target, transform, grad = torch.tensor([7], device=HERE), TRANSFORMS[name], torch.ones(1, device=HERE)
    for extreme, change in ROWS_OF_EXTREMES.items():
        bias = torch.randn(5000, device=HERE)
        change(bias)
        ours, theirs = (way.score_tile(hidden, weight, bias, target, transform, True, True) for way in (fused, plain))
        for field in ("logps", "jacobian", "stats"):
            torch.testing.assert_close(
                getattr(ours, field),
                getattr(theirs, field),
                rtol=1e-4,
                atol=1e-4,
                equal_nan=True,
                msg=lambda text: f"{extreme}, {field}: {text}",  # noqa: B023
            )
        lse = theirs.lse
        found, expected = (
            way.head_coefficients(hidden @ weight.T, bias, target, lse, grad, transform, torch.float32)[0]
            for way in (fused, plain)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, equal_nan=True, msg=extreme)


@pytest.mark.ci
@pytest.mark.parametrize("target", [-100, -1, 50, 2**40])
def test_a_target_outside_the_vocabulary(target: int) -> None:
    """NaN for its token, which stops a run before the step, and no reads outside of the tile."""
    from alignment.models.tiles import fused

    torch.manual_seed(0)
    logits, targets = torch.randn(2, 50, device=HERE), torch.tensor([target, 3], device=HERE)
    found = fused.measure(logits, None, targets, LogitTransform(), True)
    assert bool(found.logps[0].isnan()) and bool(found.top1[0] == 0)
    torch.testing.assert_close(found.logps[1], logits[1].log_softmax(0)[3])
    torch.testing.assert_close(found.lse, logits.logsumexp(1))
    expected = -logits.softmax(1)
    expected[1, 3] += 1
    coefficients = fused.differentiate(logits, None, targets, found.lse, LogitTransform(), torch.float32)
    torch.testing.assert_close(coefficients, expected)


UPSTREAM = {
    "contiguous": lambda count: torch.linspace(-1, 1, count, device=HERE),
    "expanded": lambda count: torch.full((), 0.25, device=HERE).expand(count),
    "strided": lambda count: torch.linspace(-1, 1, 3 * count, device=HERE).view(count, 3)[:, 1],
}


@pytest.mark.parametrize("layout", UPSTREAM)
@pytest.mark.parametrize("way", ["torch", "triton"])
def test_any_layout_and_targets_at_the_edges_of_slices(way: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of the vocabulary is a target once, so those at both sides of the edge of the slice of 16 too."""
    monkeypatch.setenv(choice.VARIABLE, way)
    torch.manual_seed(0)
    count, upstream = 20, UPSTREAM[layout](20)
    targets = torch.stack((torch.zeros(count, dtype=torch.int64), torch.randperm(count)), 1).to(HERE)[:, 1]
    hidden, weight = (torch.randn(6, count, device=HERE).t().requires_grad_() for _ in range(2))
    bias = torch.randn(count, 2, device=HERE)[:, 1].requires_grad_()
    wide = [each.detach().double().requires_grad_() for each in (hidden, weight, bias)]
    expected = dense(*wide, targets, TRANSFORMS["both"])
    found, _ = token_logprobs(hidden, weight, bias, targets, TRANSFORMS["both"])
    assert upstream.is_contiguous() == (layout == "contiguous")
    expected.backward(upstream.double())
    found.backward(upstream)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip((hidden, weight, bias), wide):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inner", [3, 4, 5, 8, 9])
@pytest.mark.parametrize("outer", [3, 4, 5, 8, 9])
def test_products_in_slices_of_four(inner: int, outer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit, one below and one above, once and twice."""
    monkeypatch.setattr(products, "_CAST_SLICE", 4)
    left, right = torch.arange(2.0 * inner).view(2, inner), torch.arange(float(inner * outer)).view(inner, outer)
    found = products.wide_product(left.bfloat16(), right.bfloat16(), torch.float32)
    torch.testing.assert_close(found, left @ right, rtol=0, atol=0)


@pytest.mark.ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_coefficients_overwrite_the_logits(dtype: torch.dtype) -> None:
    """Strided rows of more than one block; memory between the rows is unchanged."""
    from alignment.models.tiles import fused

    torch.manual_seed(0)
    memory = torch.randn(3, 6000, device=HERE)
    logits, between = memory[:, :5001], memory[:, 5001:].clone()
    expected = -logits.softmax(1)
    none, lse = torch.full((3,), -1, device=HERE), logits.logsumexp(1)
    found = fused.differentiate(logits, None, none, lse, LogitTransform(), dtype)
    assert found.data_ptr() == memory.data_ptr() and found.dtype == dtype and found.shape == (3, 5001)
    torch.testing.assert_close(found.float(), expected, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-6)
    assert torch.equal(memory[:, 5001:], between)


@needs_interpreter
@pytest.mark.ci
def test_rows_beyond_2_to_the_31_entries(tmp_path: Path) -> None:
    """In sparse memory, a file with holes. With 32-bit offsets, row 2 would precede row 0."""
    from alignment.models.tiles import fused

    stride, columns = 2**30, 300
    holes = np.memmap(tmp_path / "logits", dtype=np.float32, mode="w+", shape=(5 * stride,))
    torch.manual_seed(0)
    rows, targets = torch.randn(3, columns), torch.tensor([1, 2, 3])
    logits = torch.from_numpy(holes).as_strided((3, columns), (stride, 1), 2 * stride).copy_(rows)
    found = fused.measure(logits, None, targets, LogitTransform(), True)
    torch.testing.assert_close(found.logps, rows.log_softmax(1)[range(3), targets])
    fused.differentiate(logits, None, targets, rows.logsumexp(1), LogitTransform(), torch.float32)
    torch.testing.assert_close(logits, torch.nn.functional.one_hot(targets, columns) - rows.softmax(1))


# Compilation without a GPU -------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_the_kernels_compile_for_every_generation_of_gpus(tmp_path: Path) -> None:
    """From Turing to Blackwell. A barrier separates reading logits from overwriting them with coefficients."""
    variables = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    variables.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, DRIVERS / "compiled_kernels.py"], env=variables, capture_output=True, text=True, timeout=240
    )
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {kernel["capability"] for kernel in found} == {75, 80, 90, 120} and len(found) == 4 * 8
    for kernel in found:
        assert kernel["cubin"] > 1000, kernel
        if kernel["name"] == "differentiate":
            order = [what for what in kernel["order"] if what in ("load", "barrier", "store")]
            loop = order[order.index("barrier") - 1 :]
            assert loop[0] == "load" and loop[1] == "barrier" and loop[-1] == "store", kernel


# Choice --------------------------------------------------------------------------------------------------------------


def test_no_kernel_on_a_plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with the interpreter enabled in these tests."""
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    choice.settle(torch.device("cpu"), torch.bfloat16, bool)
    assert choice.tiles_for(torch.zeros(1)) is choice.PLAIN


def test_kernels_only_if_requested_and_in_fp32(kernels: None) -> None:
    assert choice.tiles_for(torch.zeros(1, device=HERE)) == choice.fused_tiles()
    assert choice.tiles_for(torch.zeros(1, device=HERE, dtype=torch.float64)) is choice.PLAIN
    with mock.patch.dict(os.environ, {choice.VARIABLE: "torch"}):
        assert choice.tiles_for(torch.zeros(1, device=HERE)) is choice.PLAIN
    with mock.patch.dict(os.environ, {choice.VARIABLE: "Triton"}), pytest.raises(OptionError, match="expected one of"):
        choice.tiles_for(torch.zeros(1))


@needs_interpreter
def test_kernels_on_a_cpu_need_the_interpreter(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(OptionError, match="cpu tensors require TRITON_INTERPRET=1"):
        choice.tiles_for(torch.zeros(1))


@pytest.mark.parametrize(
    ("version", "reason"), [(None, "ImportError|ModuleNotFoundError"), ("3.3.1", "older than 3.4")]
)
def test_torch_operations_are_used_without_triton(
    version: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = None if version is None else ModuleType("triton")
    if module is not None:
        setattr(module, "__version__", version)  # noqa: B010
    monkeypatch.setitem(sys.modules, "triton", module)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    choice.settle(torch.device("cuda"), torch.bfloat16, bool)
    line = capsys.readouterr().out
    assert line.startswith("log-probs: using torch operations instead of Triton kernels: ") and line.count("\n") == 1
    assert re.search(reason, line)
    assert choice._settled == {("cuda", torch.bfloat16): False}
    monkeypatch.setenv(choice.VARIABLE, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(OptionError, match="install triton, or unset ALIGNMENT_HEAD_TILES"):
        choice.tiles_for(torch.zeros(1))


def test_settled_in_the_dtype_of_each_model_before_its_scorer_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a policy and of a reward model in other dtypes; one that fails is enough."""
    calls: list[Any] = []

    def trial(tiles: choice.Tiles, device: torch.device, dtype: torch.dtype) -> str | None:
        calls.append(dtype)
        return "it failed" if dtype == torch.float32 else None

    monkeypatch.setattr(choice, "trial", trial)
    monkeypatch.setattr(choice, "_interpreting", lambda: False)
    monkeypatch.setattr(scoring, "true_on_every_rank", bool)
    monkeypatch.setattr(scoring, "without_math_kernel", lambda model, device: nullcontext())
    task = mock.Mock()
    task.check_scorer.side_effect = lambda *_: calls.append("checked")
    hidden = mock.Mock(device=torch.device("cuda"), dtype=torch.bfloat16, is_cuda=True)
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float32):
        assert choice.tiles_for(hidden) == (choice.fused_tiles() if calls else choice.PLAIN)
        scorer = torch.nn.Module()
        scorer.model = mock.Mock(dtype=dtype)
        checked(mock.Mock(device=torch.device("cuda"), scorer=scorer), task)
    assert calls == [torch.bfloat16, "checked", "checked", torch.float32, "checked"]
    assert choice.tiles_for(hidden) is choice.PLAIN


@pytest.mark.ci
def test_one_rank_without_kernels_is_enough(ranks: RankServer) -> None:
    done = ranks.run(DRIVERS / "tile_votes.py", nproc=2)
    assert sorted(done.stdout.split()) == ["0:False", "0:True", "1:False", "1:True"]


def test_the_head_uses_the_selected_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forward and the backward pass."""
    asked: list[torch.dtype] = []

    def tiles_for(hidden: Tensor) -> choice.Tiles:
        asked.append(hidden.dtype)
        return choice.PLAIN

    monkeypatch.setattr(logprobs, "tiles_for", tiles_for)
    hidden, weight, _, targets, upstream = problem(20, 4, 50, False)
    token_logprobs(hidden.requires_grad_(), weight.requires_grad_(), None, targets)[0].backward(upstream)
    assert len(asked) == 2
