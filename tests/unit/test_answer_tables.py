"""Completions at evaluation: prompts, sampling settings, and tables that are written once."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from transformers import GenerationConfig

from alignment import CPOConfig, LogCompletionsCallback, RewardConfig, WinRateCallback
from alignment.config.errors import OptionError
from alignment.reporting.completions import CompletionTable
from alignment.rollout.backend import Sampling
from alignment.run.stop import Cut
from alignment.training.sampling import answers, sampler
from alignment.training.sampling.answers import EvaluationAnswers, shortened
from alignment.training.sampling.sampler import completions, first_prompts, fitting, of_model, sampling_of


def decode(ids: Any, clean_up_tokenization_spaces: bool = True, **more: Any) -> str:
    """Some tokenizers remove spaces before punctuation unless told otherwise."""
    return " ".join(map(str, ids)) if not clean_up_tokenization_spaces else "cleaned up"


TOKENIZER = SimpleNamespace(eos_token_id=1, pad_token_id=None, decode=decode)


def data(prompts: list[list[int]], key: str = "k") -> Any:
    return SimpleNamespace(dataset=Dataset.from_dict({"prompt_ids": prompts}), key=key, where="eval_dataset")


def test_first_distinct_prompts() -> None:
    rows = data([[1, 2], [], [1, 2], [1, 3], [1, 4]])
    assert first_prompts(rows, 2) == [(1, 2), (1, 3)] and first_prompts(rows, None) == [(1, 2), (1, 3), (1, 4)]
    assert first_prompts(data([[], []]), 2) == []
    assert first_prompts(data([[0], [0]]), 2) == [], "a BOS token alone is not a prompt"


def test_prompts_leave_space_for_a_completion() -> None:
    model: Any = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=4))
    )
    sampling = sampling_of(GenerationConfig(), TOKENIZER, 9)
    prompts, cut = fitting(model, [(1,), (1, 2, 3), (1, 2, 3, 4)], sampling)
    assert prompts == [(1,), (1, 2, 3)] and cut.max_new_tokens == 1


def test_sampling_settings_of_a_generation_config() -> None:
    given = GenerationConfig(
        do_sample=True, temperature=0.5, top_p=0.9, min_p=0.1, max_new_tokens=7, eos_token_id=[2, 3]
    )
    found = sampling_of(given, TOKENIZER, 9, draw=False)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.5, 0.9, 0, 0.1)
    assert (found.max_new_tokens, found.eos_token_ids, found.pad_token_id) == (7, (1, 2, 3), 1)
    likeliest = sampling_of(GenerationConfig(temperature=0.5, repetition_penalty=1.5), TOKENIZER, 9, draw=False)
    assert (likeliest.top_k, likeliest.temperature, likeliest.max_new_tokens) == (1, 1.0, 9)
    assert likeliest.repetition_penalty == 1.5
    assert sampling_of(GenerationConfig(), TOKENIZER, 9).top_k == 0
    assert sampling_of(GenerationConfig(no_repeat_ngram_size=2), TOKENIZER, 9).extra == {"no_repeat_ngram_size": 2}
    with pytest.raises(OptionError, match="generation_config: num_beams=4: completions are sampled one by one"):
        sampling_of(GenerationConfig(num_beams=4), TOKENIZER, 9)
    own = of_model(GenerationConfig(num_beams=4, temperature=0.5, max_length=40, eos_token_id=5))
    assert (own.temperature, own.eos_token_id) == (0.5, 5)
    assert sampling_of(own, TOKENIZER, 9).max_new_tokens == 9


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A run on the first rank, whose models generate their names."""
    speakers = []

    def said(context: Any, speaker: Any, prompts: Any, sampling: Any, phase: str) -> list[str]:
        speakers.append(speaker.engine)
        if speaker.engine == "cut":
            raise Cut
        return [f"{speaker.engine} {sum(prompt)}" for prompt in prompts]

    monkeypatch.setattr(answers, "completions", said)
    monkeypatch.setattr(answers, "fitting", lambda model, prompts, sampling: (prompts, sampling))
    monkeypatch.setattr(answers, "of_model", lambda config: GenerationConfig())
    monkeypatch.setattr(answers.Speaker, "model", SimpleNamespace(generation_config=None))
    monkeypatch.setattr(answers, "speaker_of", lambda reference: reference and answers.Speaker(reference))
    phases = SimpleNamespace(of_evaluation=lambda: __import__("contextlib").nullcontext())
    options = CPOConfig(str(tmp_path), num_completions_to_log=2, max_new_tokens=9, disable_tqdm=True)
    context = SimpleNamespace(
        output_dir=tmp_path,
        is_first=True,
        events=SimpleNamespace(handler=SimpleNamespace(callbacks=[])),
        state=SimpleNamespace(global_step=3, eval_steps=2),
        processing_class=TOKENIZER,
        phases=phases,
        args=options,
        data=SimpleNamespace(eval={"": None}),
        run_state=SimpleNamespace(parts={}, register=lambda name, part: part),
    )
    rows = data([[1, 2], [1, 3], [1, 4]])
    return SimpleNamespace(
        context=context,
        made=lambda in_run=True: EvaluationAnswers(context, lambda: in_run),  # type: ignore[arg-type]
        models=lambda policy, reference=None: SimpleNamespace(policy=policy, reference=reference),
        rows=rows,
        speakers=speakers,
        out=lambda: capsys.readouterr().out,
        lines=lambda: [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()],
    )


def test_table_and_terminal_output(run: Any) -> None:
    made = run.made()
    for _ in range(2):
        made(run.models("policy", "reference"), run.rows, "eval")
    row = {"step": 3, "dataset": "eval", "prompt": "1 2", "policy": "policy 3", "reference": "reference 3"}
    assert run.lines()[0] == row and len(run.lines()) == 4
    assert run.speakers == ["policy", "reference", "policy"]  # the reference does not change
    shown = ["step 3: completions for 2 prompts of eval", "  prompt     '1 2'", "  policy     'policy 3'"]
    assert "\n".join([*shown, "  reference  'reference 3'", ""]) in run.out()
    assert shortened("x" * 160) == "x" * 160 and shortened("x" * 161) == f"{'x' * 80} … {'x' * 80}"


def test_missing_reference_or_prompts_are_reported_once(run: Any) -> None:
    made = run.made()
    for _ in range(2):
        made(run.models("policy"), run.rows, "eval")
        made(run.models("policy"), data([[], []], "none"), "eval")
    assert "reference" not in run.lines()[0]
    out = run.out()
    assert (
        out.count("generate_during_eval: cpo has no reference, so the tables contain only the policy's completions")
        == 1
    )
    assert out.count("generate_during_eval: eval_dataset: no row has a prompt") == 1


def test_the_file_of_an_earlier_run_is_not_modified(run: Any) -> None:
    run.made(in_run=False)(run.models("policy"), run.rows, "eval")
    assert not (run.context.output_dir / "completions.jsonl").exists() and "policy 3" in run.out()


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
        with pytest.raises(OptionError, match=f"^{callback.__name__}: not supported; set generate_during_eval"):
            callback(None, num_prompts=2)
    with pytest.raises(OptionError, match="a reward model does not generate completions"):
        RewardConfig(output_dir="x", generate_during_eval=True)
    assert CompletionTable(None).state_dict()["bytes"] == 0


def test_answers_are_in_the_order_of_the_prompts_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a phase add up over evaluations."""
    requests: list[Any] = []

    class Rollout:
        def __init__(self, engine: Any, **sizes: Any) -> None:
            assert (engine, sizes["batch_size"], sizes["longest_context"]) == ("engine", 4, 3 + 7)

        def generate(self, request: Any) -> list[Any]:
            requests.append(request)
            return [[SimpleNamespace(ids=[9] * len(prompt))] for prompt in request.prompts]

    monkeypatch.setattr(sampler, "RolloutEngine", Rollout)
    monkeypatch.setattr(sampler, "gathered", lambda own: [own])
    monkeypatch.setattr(sampler, "continuations", lambda prompt, ids, tokenizer: [f"{prompt}{ids}"])
    record = SimpleNamespace(tokens=0)
    context: Any = SimpleNamespace(
        args=SimpleNamespace(eval_batch_size=4, disable_tqdm=True, seed=7), processing_class=None,
        phases=lambda name: contextlib.nullcontext(record),
    )  # fmt: skip
    speaker: Any = SimpleNamespace(engine="engine", computing=contextlib.nullcontext)
    sampling = Sampling(max_new_tokens=7, eos_token_ids=(), pad_token_id=0)
    for number in (1, 2):
        found = completions(context, speaker, [(1, 2, 3), (4,)], sampling, "answers")
        assert found == ["[1, 2, 3][[9, 9, 9]]", "[4][[9]]"] and record.tokens == 8 * number
    assert completions(context, speaker, [], sampling, "answers") == [] and requests[0].seed == requests[1].seed
