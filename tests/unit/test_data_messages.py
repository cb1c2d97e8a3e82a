"""Normalization of messages: null content with tool calls, parts, ShareGPT turns, JSON strings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from support.data_tokenizers import CHATML, TOOLS, byte_tokenizer, char_tokenizer
from support.prepared import prepared

from alignment.config.errors import DataError
from alignment.data.kinds.completions import COMPLETIONS
from alignment.data.kinds.pairs import PAIRS
from alignment.data.kinds.prompts import PROMPTS
from alignment.data.kinds.scored_pairs import SCORED_PAIRS
from alignment.data.kinds.unpaired import UNPAIRED
from alignment.data.messages import Source, conversation, source_of, text_of
from alignment.data.tokenization import RowTokenizer

CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
OTHER = {"name": "g", "arguments": {}}
CALLING = {"role": "assistant", "content": None, "tool_calls": CALLS}
TEXT = {"type": "text", "text": "a "}
USER = {"role": "user", "content": "hi"}
ANSWER = [{"role": "assistant", "content": "a"}]


def message(value: dict[str, Any]) -> dict[str, Any]:
    [made] = text_of({"prompt": [value]}, "prompt", "row 1")
    assert isinstance(made, dict)
    return made


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (CALLING, CALLING),
        ({"role": "assistant", "tool_calls": CALLS}, CALLING),  # no content key
        ({**CALLING, "content": "so"}, {**CALLING, "content": "so"}),
        ({"role": "assistant", "content": "so", "tool_calls": []}, {"role": "assistant", "content": "so"}),
        ({"role": "assistant", "content": "so", "tool_calls": None}, {"role": "assistant", "content": "so"}),
        ({"role": "user", "content": []}, {"role": "user", "content": ""}),
        ({"role": "user", "content": [TEXT, {**TEXT, "image": None}]}, {"role": "user", "content": "a a "}),
        ({"from": "human", "value": "a"}, {"role": "user", "content": "a"}),
        ({"from": "gpt", "value": "a", "weight": 1}, {"role": "assistant", "content": "a"}),
        ({"from": "system", "value": "a"}, {"role": "system", "content": "a"}),
        ({"from": "observation", "value": "a"}, {"role": "tool", "content": "a"}),
        ({"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}, CALLING),
        (
            {"from": "function_call", "value": json.dumps([CALLS[0]["function"], OTHER])},
            {**CALLING, "tool_calls": [*CALLS, {"type": "function", "function": OTHER}]},
        ),
        ({"role": None, "content": None, "from": "human", "value": "a"}, {"role": "user", "content": "a"}),
    ],
)
def test_messages(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert message(given) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"role": "assistant", "content": None}, "content is null; expected a string"),
        ({**CALLING, "tool_calls": []}, "content is null"),
        ({**CALLING, "tool_calls": "f()"}, r"tool_calls is 'f\(\)' \(a string\); expected a list of calls"),
        ({**CALLING, "tool_calls": ["f()"]}, r"tool_calls is \['f\(\)'\] \(a list\)"),
        ({"role": "user", "content": [TEXT, {"type": "image", "url": "x"}]}, r"content\[1\] has type 'image' \(a str"),
        ({"role": "user", "content": ["a"]}, r"content\[0\] is 'a' \(a string\); expected"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\] is {'type': 'text'}"),
        ({"from": "bing", "value": "a"}, r"from is 'bing' \(a string\); expected one of system, user"),
        ({"from": ["a"], "value": "a"}, r"from is \['a'\]"),
        ({"from": "human", "value": 3}, r"value is 3 \(an integer\)"),
        ({"from": "function_call", "value": "f(x)"}, r"value is 'f\(x\)' \(a string\), which is not valid JSON"),
        ({"from": "function_call", "value": '{"name": "f"}'}, r'value is .*; expected a call such as {"name": …'),
    ],
)
def test_invalid_messages(given: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=rf"^row 1: prompt\[0\]\.?{said}"):
        message(given)


def test_conversations_end_with_the_assistant() -> None:
    source = conversation({"messages": [USER, *ANSWER]}, "messages", "row 1")
    assert (source.prompt, source.completions) == ([USER], (ANSWER,))
    for messages, said in (([USER], "has role 'user' .* expected 'assistant'"), ("hi", "messages is 'hi'")):
        with pytest.raises(DataError, match=f"^row 1: .*{said}"):
            conversation({"messages": messages}, "messages", "row 1")


@pytest.mark.parametrize("ending", ["user", "asistant"])
@pytest.mark.parametrize(
    ("kind", "rows", "key"),
    [
        (UNPAIRED, {"prompt": [USER], "completion": 0, "label": True}, "completion"),
        (UNPAIRED, {"prompt": [USER], "chosen": 1, "rejected": 0}, "rejected"),
        (COMPLETIONS, {"prompt": [USER], "completion": 0}, "completion"),
        (PAIRS, {"prompt": [USER], "chosen": 0, "rejected": 1}, "chosen"),
        (PAIRS, {"prompt": "hi", "chosen": 1, "rejected": 0}, "rejected"),
        (PAIRS, {"chosen": 0, "rejected": 1}, "chosen"),  # with the prompt, and both end with the same message
        (SCORED_PAIRS, {"chosen": 1, "rejected": 0}, "rejected"),
    ],
)
def test_completions_end_with_the_assistant(
    tmp_path: Path, kind: Any, rows: dict[str, Any], key: str, ending: str
) -> None:
    answers = [[USER, {"role": "assistant", "content": text}] for text in "ab"]
    answers[0] = [*answers[0], {"role": ending, "content": "c"}]
    row = {name: answers[value] if value in (0, 1) and name != "label" else value for name, value in rows.items()}
    good = {**row, key: answers[1][:1] + [{"role": "assistant", "content": "d"}]}
    with pytest.raises(DataError, match=f"^data, row 2: the last message in {key} has role {ending!r}"):
        prepared([good, row], kind, tmp_path, byte_tokenizer())


def test_unknown_roles_are_refused(tmp_path: Path) -> None:
    def made(role: str, template: str = CHATML, **more: Any) -> int:
        rows = [{"prompt": [USER], "completion": ANSWER, "label": True}]
        rows += [{**rows[0], "prompt": [USER, {"role": role, "content": "a"}], **more}]
        return len(prepared(rows, UNPAIRED, tmp_path, byte_tokenizer(template)).dataset)

    for role in ("system", "developer", "user", "assistant", "tool", "function"):
        assert made(role) == 2
    python = "{% if messages[0].role == 'ipython' %}{% endif %}" + CHATML
    assert made("ipython", python) == 2
    with pytest.raises(DataError, match="^data, row 2: role is 'python'"):
        made("python", python)
    for role, near in (("usre", "user"), ("use", "user"), ("Assistant", "assistant"), ("ipython", None), ("", None)):
        with pytest.raises(DataError, match=f"^data, row 2: role is {role!r}") as caught:
            made(role)
        assert str(caught.value).endswith(f"did you mean {near!r}?") is (near is not None)
    with pytest.raises(DataError, match="^data, row 2: role is 'usre'"):
        made("user", completion=[{"role": "usre", "content": "a"}, ANSWER[0]])


@pytest.mark.parametrize("template", ["the same", "{% for m in messages %}{{ m.role }}{% endfor %}"])
@pytest.mark.parametrize("kind", [UNPAIRED, PAIRS, SCORED_PAIRS, PROMPTS])
def test_a_template_that_renders_every_row_alike_is_refused(tmp_path: Path, kind: Any, template: str) -> None:
    other = [{**ANSWER[0], "content": "other"}]
    row = {"prompt": [USER], "completion": ANSWER, "label": True}
    if kind in (PAIRS, SCORED_PAIRS):
        row = {"prompt": [USER], "chosen": ANSWER, "rejected": other}
    with pytest.raises(DataError, match="^data, row 1: the chat template .* renders every row alike"):
        prepared([row], kind, tmp_path, byte_tokenizer(template))


def test_template_variables_may_be_json_strings() -> None:
    row = {"chat_template_kwargs": '{"enable_thinking": false}', "tools": '[{"name": "f"}]'}
    assert source_of(row, "row 1", "").template == {"enable_thinking": False, "tools": [{"name": "f"}]}
    assert source_of({"tools": "", "chat_template_kwargs": None}, "row 1", "").template == {}
    assert source_of({"tools": []}, "row 1", "").template == {}
    for key, value, said in (
        ("tools", "f()", "not valid JSON"),
        ("tools", "{}", "expected a list of tool"),
        ("chat_template_kwargs", "[]", "expected an object"),
    ):
        with pytest.raises(DataError, match=f"^row 1: {key} is .*{said}"):
            source_of({key: value}, "row 1", "")


def rendered(template: str, *messages: dict[str, Any]) -> str:
    """Render a conversation whose last message is the completion."""
    tokenizer = char_tokenizer(template=template)
    *prompt, answer = messages
    rows = RowTokenizer(tokenizer)
    return rows._rendered(prompt, Source(prompt, ([answer],), "row 1", {}))[1]


def test_null_content_in_templates() -> None:
    """It is omitted, as in transformers, or replaced with an empty string if the template requires it."""
    knows = "{% for m in messages %}{{ m.content if m.content is defined else 'CALL' }};{% endfor %}"
    assert rendered(knows, USER, CALLING) == "hi;CALL;"
    assert rendered(TOOLS, USER, CALLING).endswith('<call>{"name": "f", "arguments": {"x": 1}}</call><|im_end|>\n')
    assert rendered(CHATML, USER, CALLING).endswith("<|im_start|>assistant\n<|im_end|>\n")  # not "None"
    needs = "{% for m in messages %}{{ m.role + ':' + m.content }};{% endfor %}"
    assert rendered(needs, USER, CALLING) == "user:hi;assistant:;"
    with pytest.raises(DataError, match="^row 1: the chat template .* failed: no calls"):
        rendered("{{ raise_exception('no calls') }}", USER, CALLING)


def test_templates_do_not_see_nulls_added_by_arrow(tmp_path: Path) -> None:
    """The same rows give the same tokens as written and in Arrow's structs."""
    other = {"type": "function", "function": {"name": "g", "arguments": {"y": "z"}}}
    rows = [
        {"prompt": [USER], "completion": [CALLING], "label": True, "tools": CALLS},
        {"prompt": [USER], "completion": [{**CALLING, "tool_calls": [other]}], "label": True, "tools": [other]},
        {"prompt": [USER], "completion": [{"role": "assistant", "content": "so"}], "label": True, "tools": None},
    ]
    tokenizer = byte_tokenizer(TOOLS)
    read = [
        prepared(data, UNPAIRED, tmp_path / str(number), tokenizer).dataset.to_list()
        for number, data in enumerate((rows, Dataset.from_list(rows)))
    ]
    assert Dataset.from_list(rows)[0]["tools"][0]["function"]["arguments"] == {"x": 1, "y": None}
    assert read[0] == read[1]
    texts = [tokenizer.decode(row["completion_ids"]) for row in read[0]]
    assert '"arguments": {"x": 1}}' in texts[0] and '"arguments": {"y": "z"}}' in texts[1]
