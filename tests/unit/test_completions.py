"""Tables of completions: their files, text, Weights & Biases and TensorBoard; and those sampled at evaluation."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from transformers import GenerationConfig, TrainerControl, TrainerState
from transformers.integrations import TensorBoardCallback, WandbCallback

from alignment import CPOConfig, KTOConfig, LogCompletionsCallback, RewardConfig, WinRateCallback
from alignment.config.errors import OptionError
from alignment.data.kinds.prompts import PromptRow
from alignment.online.completion_log import CompletionLog
from alignment.online.completions import Generated
from alignment.online.ranking import Ranking
from alignment.reporting.log import CompletionTable, as_text
from alignment.rollout.backend import Completion, Sampling
from alignment.run.stop import Cut
from alignment.training import sampling
from alignment.training.sampling import EvaluationAnswers, completions, first_prompts, sampling_of

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\nthere"}]
TEXT = "system: Be brief.\nuser: Hi\nthere"
ROWS: list[dict[str, Any]] = [
    {"prompt": ASKED, "chosen": [{"role": "assistant", "content": "é|*x*"}], "score": None, "dropped": "tied"},
    {"prompt": "p", "chosen": "<b>_c_", "score": 0.125, "dropped": None},
]


def test_the_file_has_one_line_per_row(tmp_path: Path) -> None:
    path = tmp_path / "out" / "completions.jsonl"
    table = CompletionTable(path)
    table.write_table(3, ROWS)
    table.write_table(4, [{"prompt": "p", "chosen": "c", "score": float("inf"), "dropped": None}])
    table.write_table(5, [])
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert lines == [
        {"step": 3, "prompt": TEXT, "chosen": "é|*x*", "score": None, "dropped": "tied"},
        {"step": 3, "prompt": "p", "chosen": "<b>_c_", "score": 0.125, "dropped": None},
        {"step": 4, "prompt": "p", "chosen": "c", "score": None, "dropped": None},
    ]


def test_tables_are_written_every_n_logs(tmp_path: Path) -> None:
    """With the first prompts of the newest window; not at other logs, nor without pairs."""
    source = PromptRow(0, "p", {}, {})
    made = tuple(Completion((number,), True) for number in range(3))
    group, ranking = Generated(0, source, "row 1", (0,), made, ("a", "b", "c")), Ranking((2, 0), (0.5, None, 1.5))
    for every, steps in ((1, [2, 3, 4, 5]), (2, [2, 4]), (3, [3]), (0, [])):
        path = tmp_path / f"{every}.jsonl"
        log = CompletionLog(CompletionTable(path), every, prompts=2)
        log.write(1)
        for step in range(2, 6):
            log.keep([group] * 3, [ranking, Ranking("tied", (1.0, 1.0, 1.0)), ranking])
            log.write(step)
        log.write(6)  # an omitted window has no completions
        assert log.state_dict()["logs"] == 6
        lines = [json.loads(line) for line in path.read_text().splitlines()] if steps else []
        assert [line["step"] for line in lines] == [step for step in steps for _ in range(2)]
        for pair, dropped in zip(lines[::2], lines[1::2], strict=True):
            assert (pair["chosen"], pair["rejected"], pair["dropped"]) == ("c", "a", None)
            assert (pair["chosen_score"], pair["rejected_score"]) == (1.5, 0.5)
            assert (dropped["chosen"], dropped["rejected"], dropped["dropped"]) == ("a", "b", "tied")


def test_messages_as_text() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert as_text([call]) == "assistant: {'function': {'name': 'f'}}" and as_text(0.5) == 0.5


def test_tensorboard_gets_text(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = KTOConfig(output_dir=str(tmp_path))
    state, control = TrainerState(is_world_process_zero=True), TrainerControl()
    callbacks: list[Any] = []
    table = CompletionTable(tmp_path / "completions.jsonl", callbacks)
    callbacks.append(TensorBoardCallback())  # callbacks added later are used
    table.write_table(1, ROWS)  # no writer yet
    callbacks[0].on_train_begin(args, state, control)
    table.write_table(2, ROWS[:1])
    table.write_table(4, ROWS)
    callbacks[0].on_train_end(args, state, control)
    (file,) = (tmp_path / "runs").rglob("events.*")
    events = EventAccumulator(str(file)).Reload().Tensors("completions/text_summary")
    assert [event.step for event in events] == [2, 4]
    (text,) = events[1].tensor_proto.string_val
    lines = text.decode().splitlines()
    assert "    prompt: system: Be brief." in lines and all(line.startswith("    ") or not line for line in lines)


def test_wandb_gets_a_table(wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_DIR", str(tmp_path)), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    table = CompletionTable(tmp_path / "completions.jsonl", [WandbCallback()])
    assert wandb.run is None
    table.write_table(1, ROWS)  # no run: nothing to log to
    run = wandb.init(project="tests")
    table.write_table(2, ROWS)
    logged, folder = run.summary["completions"], Path(run.dir)  # an earlier run of this process may have set it
    wandb.finish()
    assert (logged["_type"], logged["nrows"], logged["ncols"]) == ("table-file", 2, 5)
    (file,) = folder.rglob("media/table/completions*.table.json")
    content = json.loads(file.read_text())
    assert content["columns"] == ["step", "prompt", "chosen", "score", "dropped"]
    assert content["data"][1] == [2, "p", "<b>_c_", 0.125, None]
    assert content["data"][0][2:] == ["é|*x*", None, "tied"]


def decode(ids: Any, clean_up_tokenization_spaces: bool = True, **more: Any) -> str:
    """Some tokenizers remove spaces before punctuation unless told otherwise."""
    return " ".join(map(str, ids)) if not clean_up_tokenization_spaces else "cleaned up"


TOKENIZER = SimpleNamespace(eos_token_id=1, pad_token_id=None, decode=decode)


def data(prompts: list[list[int]], key: str = "k", cut: bool = False) -> Any:
    dataset = Dataset.from_dict({"prompt_ids": prompts, "prompt_cut": [cut] * len(prompts)})
    return SimpleNamespace(dataset=dataset, key=key, where="eval_dataset")


def test_first_distinct_prompts() -> None:
    assert first_prompts(data([[1, 2], [], [1, 2], [1, 3], [1, 4]]), 2) == {(1, 2): False, (1, 3): False}
    assert first_prompts(data([[0], [], [0]]), 2) == {}, "a BOS token alone is not a prompt"


def test_sampling_settings_of_a_generation_config() -> None:
    shape: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5}
    others = {"num_beams": 4, "max_length": 40, "max_new_tokens": 7, "eos_token_id": [2, 3]}
    found = sampling_of(GenerationConfig(no_repeat_ngram_size=2, **shape, **others), TOKENIZER, 9)
    assert found == Sampling(9, (1, 2, 3), 1, extra={"no_repeat_ngram_size": 2}, **shape)
    assert sampling_of(GenerationConfig(), TOKENIZER, 9) == Sampling(9, (1,), 1)
    assert sampling_of(GenerationConfig(top_k=4), SimpleNamespace(eos_token_id=1, pad_token_id=5), 9).top_k == 4


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run on the first rank, whose models generate their names."""
    speakers, longest = list[str](), list[int]()

    def said(context: Any, speaker: Any, prompts: Any, sampling: Sampling) -> list[str]:
        name = getattr(speaker[0], "name", speaker[0])
        speakers.append(name)
        longest.append(sampling.max_new_tokens)
        if name == "cut":
            raise Cut
        return [f"{name} {sum(prompt)}" for prompt in prompts]

    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=4))
    scorer = SimpleNamespace(model=SimpleNamespace(generation_config=GenerationConfig(), config=config))
    monkeypatch.setattr(sampling, "completions", said)
    monkeypatch.setattr(sampling, "speaker_of", lambda reference: reference and (reference, None))
    context: Any = SimpleNamespace(
        output_dir=tmp_path, is_first=True, events=SimpleNamespace(handler=SimpleNamespace(callbacks=[])),
        state=SimpleNamespace(global_step=3), processing_class=TOKENIZER,
        phases=SimpleNamespace(of_evaluation=contextlib.nullcontext), data=SimpleNamespace(eval={"": None}),
        args=CPOConfig(str(tmp_path), num_completions_to_log=2, max_new_tokens=9, disable_tqdm=True),
        run_state=SimpleNamespace(register=lambda name, part: part),
    )  # fmt: skip
    return SimpleNamespace(
        context=context,
        made=lambda in_run=True: EvaluationAnswers(context, lambda: in_run),
        models=lambda policy, reference=None: SimpleNamespace(
            policy=SimpleNamespace(name=policy, scorer=scorer), reference=reference
        ),
        rows=data([[1, 2], [1, 3], [1, 4]]),
        speakers=speakers,
        longest=longest,
        lines=lambda: [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()],
    )


def test_prompts_leave_space_for_a_completion(run: Any) -> None:
    run.made()(run.models("policy"), data([[1, 2, 3], [1, 2, 3, 4], [1, 2]]), "eval")
    assert [line["policy"] for line in run.lines()] == ["policy 6"] and run.longest == [1]


@pytest.mark.parametrize(("mode", "shown"), [("keep_end", "…1 2"), ("keep_start", "1 2")])
def test_a_prompt_without_its_beginning(run: Any, mode: str, shown: str) -> None:
    run.context.args.truncation_mode = mode
    run.made()(run.models("policy"), data([[1, 2]], cut=True), "eval")
    assert [line["prompt"] for line in run.lines()] == [shown]


def test_table_and_terminal_output(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made = run.made()
    for _ in range(2):
        made(run.models("policy", "reference" * 20), run.rows, "eval")
    row = {"step": 3, "dataset": "eval", "prompt": "1 2", "policy": "policy 3", "reference": "reference" * 20 + " 3"}
    assert run.lines()[0] == row and len(run.lines()) == 4
    assert run.speakers == ["policy", "reference" * 20, "policy"]  # the reference does not change
    out = capsys.readouterr().out
    shown = ["step 3: completions for 2 prompts of eval", "  prompt     '1 2'", "  policy     'policy 3'"]
    assert "\n".join([*shown, "  reference  'referencereference"]) in out and "reference" * 20 not in out


def test_missing_reference_or_prompts_are_reported_once(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made = run.made()
    for _ in range(2):
        made(run.models("policy"), run.rows, "eval")
        made(run.models("policy"), data([[], []], "none"), "eval")
    assert "reference" not in run.lines()[0]
    out = capsys.readouterr().out
    assert out.count("generate_during_eval: cpo has no reference, so the tables") == 1
    assert out.count("generate_during_eval: eval_dataset: no row has a prompt") == 1


def test_the_file_of_an_earlier_run_is_not_modified(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run.made(in_run=False)(run.models("policy"), run.rows, "eval")
    assert not (run.context.output_dir / "completions.jsonl").exists() and "policy 3" in capsys.readouterr().out


def test_an_interrupted_evaluation_writes_no_table_twice(run: Any) -> None:
    first, second = run.rows, data([[1, 6]], "second")
    made = run.made()
    made(run.models("policy"), first, "eval_a")
    with pytest.raises(Cut):
        made(run.models("cut"), second, "eval_b")
    state = json.loads(json.dumps(made.state_dict()))
    resumed = run.made()
    resumed.load_state_dict(state)
    for _ in range(2):
        resumed(run.models("policy"), first, "eval_a")
        resumed(run.models("policy"), second, "eval_b")
    assert [line["dataset"] for line in run.lines()] == ["eval_a"] * 2 + ["eval_b"] + ["eval_a"] * 2 + ["eval_b"]
    run.context.state.global_step = 4
    later = run.made()
    later.load_state_dict(state)  # at another step, everything is sampled
    later(run.models("policy"), first, "eval_a")
    assert [line["step"] for line in run.lines()] == [3, 3, 4, 4]


def test_refused_arguments() -> None:
    for callback in (LogCompletionsCallback, WinRateCallback):
        with pytest.raises(OptionError, match=f"^{callback.__name__}: "):
            callback(None, num_prompts=2)
    with pytest.raises(OptionError, match="generate_during_eval"):
        RewardConfig(output_dir="x", generate_during_eval=True)


def test_answers_are_in_the_order_of_the_prompts_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a phase add up over evaluations."""
    requests: list[Any] = []

    class Rollout:
        def __init__(self, engine: Any, **sizes: Any) -> None:
            assert (engine, sizes["batch_size"], sizes["longest_context"]) == ("engine", 4, 3 + 7)

        def generate(self, request: Any) -> list[Any]:
            requests.append(request)
            return [[SimpleNamespace(ids=[9] * len(prompt))] for prompt in request.prompts]

    monkeypatch.setattr(sampling, "RolloutEngine", Rollout)
    monkeypatch.setattr(sampling, "gathered", lambda own: [own])
    monkeypatch.setattr(sampling, "continuations", lambda prompt, ids, tokenizer: [f"{prompt}{ids}"])
    record = SimpleNamespace(tokens=0)
    context: Any = SimpleNamespace(
        args=SimpleNamespace(eval_batch_size=4, seed=7), processing_class=None,
        phases=lambda name: contextlib.nullcontext(record),
    )  # fmt: skip
    speaker: Any = ("engine", contextlib.nullcontext())
    for number in (1, 2):
        found = completions(context, speaker, [(1, 2, 3), (4,)], Sampling(7, (), 0))
        assert found == ["[1, 2, 3][[9, 9, 9]]", "[4][[9]]"] and record.tokens == 8 * number
    assert requests[0].seed == requests[1].seed
