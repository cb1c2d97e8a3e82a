"""A method outside the package: ``examples/orpo.py`` from the command line, an entry point and Python."""

from __future__ import annotations

import json
import math
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from support.data_tokenizers import char_tokenizer
from support.helpers import make_model, options, paired_rows, train_and_close
from support.oracle.dense import load, token_logps

from alignment import CPOConfig, SFTConfig, SFTTrainer
from alignment.cli.help import help_text
from alignment.cli.parsing import glimpse, parse
from alignment.config import registry
from alignment.config.errors import OptionError
from alignment.config.lookup import load_named
from alignment.config.registry import METHODS
from alignment.data.kinds.pairs import Pairs
from alignment.methods.cpo import CPOMethod
from alignment.methods.sft import SFTMethod
from alignment.training.method import RowLosses
from tools.ranks import RankServer

pytestmark = pytest.mark.usefixtures("own_process_group")
ORPO = f"{ROOT / 'examples' / 'orpo.py'}:ORPOTrainer"


NAMELESS = """\
import dataclasses

@dataclasses.dataclass
class Options:
    method = ""

class Trainer:
    config_class = Options
"""


def named(name: str) -> Any:
    return load_named(f"{ROOT / 'examples' / 'orpo.py'}:{name}", "method")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside")
    make_model(folder / "model", seed=3)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in paired_rows(8, seed=2)))
    return folder


def arguments(folder: Path, out: Path, *more: str) -> list[str]:
    return [
        *("--method", ORPO, "--model_name_or_path", str(folder / "model")),
        *("--dataset_name", str(folder / "pairs.jsonl"), "--output_dir", str(out), "--beta", "0.3", "--use_cpu"),
        *("--max_steps", "2", "--logging_steps", "1", "--disable_tqdm", "--optim", "sgd", "--learning_rate", "0.1"),
        *("--max_length", "64", "--max_prompt_length", "32"),
        *more,
    ]


def logged(out: Path) -> list[dict[str, Any]]:
    entries = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [entry for entry in entries if "grad_norm" in entry]


@pytest.mark.ci
def test_two_ranks_from_the_command_line(folder: Path, tmp_path: Path, ranks: RankServer) -> None:
    """Two ranks make the same updates as one; the first loss is compared with float64."""
    one, two = tmp_path / "one", tmp_path / "two"
    train = ROOT / "launch" / "train.py"
    ranks.run(train, *arguments(folder, one, "--per_device_train_batch_size", "8"), nproc=1)
    split = ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--deepspeed", "zero3")
    ranks.run(train, *arguments(folder, two, *split), nproc=2)
    for alone, shared in zip(logged(one), logged(two), strict=True):
        for name in ("loss", "grad_norm", "nll_loss", "log_odds_ratio", "rewards/margins", "logps/chosen"):
            assert shared[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6), name
    assert logged(one)[0]["loss"] == pytest.approx(float64_loss(folder, beta=0.3), rel=1e-5)
    assert json.loads((two / "options.json").read_text())["method"] == ORPO, "as it can be passed again"


def float64_loss(folder: Path, beta: float) -> float:
    """Return the loss of all rows, computed directly."""
    model, nll, tokens, penalty = load(str(folder / "model")), 0.0, 0, []
    tokenizer = char_tokenizer()
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        odds = []
        for side in ("chosen", "rejected"):
            ids = [*tokenizer(row[side], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            logps = token_logps(model, prompt, ids, 1024).detach()
            p = float(logps.mean().exp())
            odds.append(p / (1 - p))
            if side == "chosen":
                nll, tokens = nll - float(logps.sum()), tokens + len(ids)
        penalty.append(-math.log(odds[0] / (odds[0] + odds[1])))
    return nll / tokens + beta * sum(penalty) / len(rows)


def test_a_loss_of_single_tokens(folder: Path, tmp_path: Path) -> None:
    """Per-token log-probs sum to the log-probs that other methods use, with gradients."""

    class ByToken(SFTMethod):
        needs_tokens = True

        def losses(self, batch: Any, index: int, output: Any, known: Any, window: Any) -> RowLosses:
            assert output.token_logps.shape == batch.completions.targets.shape
            whole = super().losses(batch, index, output, known, window)
            local = -output.token_logps.sum() / window.counts.first_completion_tokens
            assert float(local.detach()) == pytest.approx(float(whole.local.detach()), rel=1e-6)
            return RowLosses(local, whole.rows)

    class ByTokenTrainer(SFTTrainer):
        method_class = ByToken

    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in paired_rows(8, seed=2)]
    found = []
    for cls in (SFTTrainer, ByTokenTrainer):
        args = SFTConfig(**options(tmp_path / cls.__name__, max_steps=2, optim="sgd", learning_rate=0.2))
        trainer = train_and_close(cls(str(folder / "model"), args=args, train_dataset=rows))
        found.append([(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history[:2]])
    assert found[0][1][0] < found[0][0][0] - 0.01
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


def test_options_of_an_outside_method(folder: Path, tmp_path: Path) -> None:
    parsed = parse(arguments(folder, tmp_path))
    assert (type(parsed).__name__, parsed.method, parsed.beta) == ("ORPOConfig", "orpo", 0.3)  # type: ignore[attr-defined]
    assert METHODS.trainer(parsed).__name__ == "ORPOTrainer"
    assert glimpse(arguments(folder, tmp_path)) == (ORPO, True)
    with pytest.raises(OptionError, match="^betta='0.1': unknown option; did you mean 'beta'"):
        parse([*arguments(folder, tmp_path), "--betta", "0.1"])
    with pytest.raises(OptionError, match="loss_type='sigmoid': an option of method "):
        parse([*arguments(folder, tmp_path), "--loss_type", "sigmoid"])
    assert "ORPO (--method orpo):" in help_text({"orpo": type(parsed)})


LISTS = """\
from dataclasses import dataclass
from alignment.config.fields import option
from alignment.methods.dpo import DPOTrainer
from alignment.methods.dpo_options import DPOConfig

@dataclass(kw_only=True)
class Options(DPOConfig):
    TITLE = "Lists"
    method = "lists"
    shares: list[float] | None = option(None, "Some numbers.")

class Trainer(DPOTrainer):
    config_class = Options

class Same(DPOTrainer):
    pass
"""


def test_options_of_outside_methods_can_be_lists(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LISTS)
    name = f"{tmp_path / 'mine.py'}:Trainer"
    given = [*arguments(folder, tmp_path)[2:], "--shares", "0.5", "0.25", "0.125"]
    assert parse(["--method", name, *given]).shares == [0.5, 0.25, 0.125]  # type: ignore[attr-defined]
    assert glimpse([*given, f"--method={name}"]) == (name, True)
    with pytest.raises(OptionError, match="'nope.yaml': no such file"):
        parse(["nope.yaml", "--method", name, *given])
    assert glimpse(["nope.yaml", "--use_cpu"]) == (None, True)


def test_each_method_keeps_its_trainer(folder: Path, tmp_path: Path) -> None:
    """Even if an outside trainer uses the options of a built-in method; unknown options are refused."""
    (tmp_path / "mine.py").write_text(LISTS)
    given = arguments(folder, tmp_path)[2:]
    same = parse(["--method", f"{tmp_path / 'mine.py'}:Same", *given])
    inside = parse(["--method", "dpo", *given])
    assert type(same) is type(inside)
    assert [METHODS.trainer(one).__name__ for one in (same, inside)] == ["Same", "DPOTrainer"]
    other = load_named(f"{tmp_path / 'mine.py'}:Options", "method")("out")
    with pytest.raises(OptionError, match="^method='lists': no trainer is registered for Options; call"):
        METHODS.trainer(other)


def test_a_recipe_can_name_an_outside_method(folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"method: {ORPO}\nuse_cpu: true\ntraining:\n  beta: 0.4\n")
    given = arguments(folder, tmp_path)[2:]
    assert glimpse([str(recipe)]) == (ORPO, True)
    assert parse([str(recipe), *given]).beta == 0.3  # type: ignore[attr-defined]


def test_an_installed_package_can_provide_a_method(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    entries = EntryPoints(
        EntryPoint(*names, registry.GROUP) for names in (("orpo", "orpo:ORPOTrainer"), ("gone", "no:X"))
    )
    monkeypatch.setattr(registry, "entry_points", entries.select)
    given = ["--method", "orpo", *arguments(folder, tmp_path)[2:]]
    assert type(parse(given)).__name__ == "ORPOConfig"
    with pytest.raises(OptionError, match="^method='gone': importing no:X raised ModuleNotFoundError"):
        parse(["--method", "gone"])
    with pytest.raises(OptionError, match="unknown method; .*; did you mean 'orpo'"):
        parse(["--method", "orppo"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Trainer = 3", "not a trainer class"),
        ("class Trainer: ...", "not a trainer class"),
        ("class Trainier: ...", "does not define 'Trainer'; did you mean 'Trainier'"),
        ("1 / 0", "importing mine.py raised ZeroDivisionError: division by zero .mine.py, line 1."),
        (NAMELESS, "its config_class has no name"),
    ],
)
def test_invalid_methods(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(OptionError, match=f"^method='.*mine.py:Trainer': .*{said}"):
        parse(["--method", f"{tmp_path / 'mine.py'}:Trainer"])


@pytest.mark.parametrize("kind", ["preference", Pairs, None])
def test_what_is_not_a_kind_of_rows(kind: Any) -> None:
    class Method(CPOMethod):
        pass

    Method.kind = kind
    with pytest.raises(OptionError, match=r"^method cpo: Method.kind is .*, not a kind of rows"):
        Method(CPOConfig("out"))
