"""Golden tokenizations: where the prompt ends, and that special tokens occur exactly once."""

from __future__ import annotations

from typing import Any

import pytest
from support.data_tokenizers import CHATML, PLAIN, char_tokenizer, word_tokenizer

from alignment.config.errors import DataError
from alignment.data.messages import Source
from alignment.data.tokenization import NO_CONTEXT, Encoded, Limits, RowTokenizer, fit

BOS = ("<s>",)


def encode(tokenizer: Any, prompt: Any, *completions: Any, **template: Any) -> Encoded:
    return RowTokenizer(tokenizer).encode([Source(prompt, completions, "data, row 1", template)])[0]


def golden(tokenizer: Any, prompt: Any, *completions: Any) -> list[str]:
    """Return prompt and completions as tokens joined with ``|``."""
    encoded = encode(tokenizer, prompt, *completions)
    return ["|".join(tokenizer.convert_ids_to_tokens(ids)) for ids in (encoded.prompt, *encoded.completions)]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    ("options", "prompt", "completions", "expected"),
    [
        ({"before": BOS}, "xy", ["cd"], ["<s>|x|y", "c|d|</s>"]),
        ({}, "xy", ["cd"], ["x|y", "c|d|</s>"]),  # a BOS token exists but is not added by default
        ({"before": BOS}, "<s>xy", ["cd"], ["<s>|x|y", "c|d|</s>"]),  # the text contains its own BOS
        ({"before": BOS}, "<s><s>xy", ["c"], ["<s>|x|y", "c|</s>"]),
        ({"before": BOS}, "xy", ["cd</s>"], ["<s>|x|y", "c|d|</s>"]),  # … or its own EOS
        # A tokenizer that adds EOS itself.
        ({"before": BOS, "after": ("</s>",)}, "xy", ["cd"], ["<s>|x|y", "c|d|</s>"]),
        ({"before": BOS, "after": ("</s>",)}, "xy", ["cd</s></s>"], ["<s>|x|y", "c|d|</s>"]),
        ({"before": ("[gMASK]", "<s>")}, "xy", ["c"], ["[gMASK]|<s>|x|y", "c|</s>"]),
        ({"before": ("[gMASK]", "<s>")}, "[gMASK]<s>xy", ["c"], ["[gMASK]|<s>|x|y", "c|</s>"]),
        ({"before": ("[gMASK]", "<s>")}, "<s>xy", ["c"], ["[gMASK]|<s>|x|y", "c|</s>"]),
        # The merged token at the boundary belongs to the completion, and to both of a pair.
        ({"before": BOS}, "xa", ["bc"], ["<s>|x", "ab|c|</s>"]),
        ({"before": BOS}, "xa", ["bc", "d"], ["<s>|x", "ab|c|</s>", "a|d|</s>"]),
        ({"before": BOS}, "", ["cd"], ["<s>", "c|d|</s>"]),
        ({"before": BOS}, "xy", [""], ["<s>|x|y", "</s>"]),
        ({"bos": None}, "", ["cd"], ["c", "d|</s>"]),  # the first token cannot be predicted and becomes context
        ({"bos": None}, "", ["cd", "ce"], ["c", "d|</s>", "e|</s>"]),
        ({"bos": None}, "", ["cd", "e"], ["</s>", "c|d|</s>", "e|</s>"]),
        ({"bos": None}, "a", ["bc"], ["ab", "c|</s>"]),  # a merge across the entire prompt
        ({"before": BOS, "eos": None}, "xy", ["cd"], ["<s>|x|y", "c|d"]),
    ],
)
def test_standard_text(options: dict[str, Any], prompt: str, completions: list[str], expected: list[str]) -> None:
    assert golden(char_tokenizer(**options), prompt, *completions) == expected


def test_end_of_turn_token_without_the_special_flag() -> None:
    tokenizer = char_tokenizer(template=CHATML, special_turns=False)
    assert golden(tokenizer, [user("x")], [assistant("c")])[1] == "c|<|im_end|>"
    # if the message itself ends with this token and the template does not end turns, EOS is added
    plain = char_tokenizer(template=PLAIN, special_turns=False)
    assert golden(plain, [user("x")], [assistant("c<|im_end|>")])[1] == " |c|<|im_end|>|\n|</s>"


@pytest.mark.parametrize(
    ("turn", "end", "expected"),
    [
        ("<|im_end|>\n", "</s>", "c|<|im_end|>"),  # Phi-3
        ("<|im_end|>\n", "see <|im_start|>\n</s>", "c|<|im_end|>"),
        ("[gMASK]<|im_end|>", "", "c|[gMASK]|<|im_end|>"),  # Command R7B: two tokens end every turn
        ("[gMASK]<|im_end|>", "\n</s>", "c|[gMASK]|<|im_end|>"),
        ("{% if loop.last and m.role == 'assistant' %}</s>{% else %}<|im_end|>{% endif %}", "", "c|</s>"),  # gpt-oss
        ("{% if loop.last and m.role == 'assistant' %}</s>\n{% else %}<|im_end|>{% endif %}", "", "c|</s>"),
        ("\n", "</s>", "c|\n|</s>"),
    ],
)
@pytest.mark.parametrize("content", ["c", "c<|im_end|>c"])
def test_a_completion_ends_with_its_turn(turn: str, end: str, expected: str, content: str) -> None:
    template = "{% for m in messages %}{{ m.content }}TURN{% endfor %}{% if not add_generation_prompt %}END{% endif %}"
    tokenizer = char_tokenizer(template=template.replace("TURN", turn).replace("END", end))
    said = "|".join(tokenizer.convert_ids_to_tokens(tokenizer(content)["input_ids"]))
    assert golden(tokenizer, [user("x")], [assistant(content)])[1] == said + expected[1:]


def test_an_unknown_character_ends_no_turn() -> None:
    tokenizer = word_tokenizer("user: x assistant: c")
    tokenizer.chat_template = PLAIN
    assert golden(tokenizer, [user("x")], [assistant("c ?")]) == ["user:|x|assistant:", "c|[UNK]|</s>"]


def test_templates_run_in_a_sandbox_and_rows_are_no_templates() -> None:
    for code in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(DataError, match="data, row 1: the chat template .* is unsafe"):
            encode(char_tokenizer(template=code), [user("x")], [assistant("c")])
    rows = RowTokenizer(char_tokenizer(template=PLAIN))
    source = Source([user("{{ 7 * 6 }}")], ([assistant("{% raw %}")],), "row 1", {})
    assert rows._rendered(source.prompt, source)[1] == "user: {{ 7 * 6 }}\nassistant: {% raw %}\n"


def test_no_context_token() -> None:
    encoded = encode(char_tokenizer(bos=None, eos=None), "", "c", "d")
    fitted = fit(encoded.prompt, encoded.completions, Limits(), 0)
    assert fitted.reasons == [NO_CONTEXT, NO_CONTEXT]


def test_a_prompt_is_tokenized_as_with_completions() -> None:
    for options in ({"before": ("<s>",)}, {"template": CHATML}, {"template": "<s>" + CHATML}):
        tokenizer = char_tokenizer(**options)  # type: ignore[arg-type]
        for prompt, answer in (("x y", " c"), ("", "c")):
            if "template" in options:
                prompts: Any = [[user(prompt)], [user(prompt), assistant("so")]] if prompt else [[]]
                answers: Any = [[assistant(answer)]] * 2
            else:
                prompts, answers = [prompt], [answer]
            for text, completion in zip(prompts, answers):
                alone = encode(tokenizer, text)
                assert alone.completions == [] and alone.prompt
                assert alone.prompt == encode(tokenizer, text, completion).prompt


@pytest.mark.parametrize(
    ("template", "prompt", "completion", "expected"),
    [
        (PLAIN, [], [user("x"), assistant("c")], ["u|s|e|r|:| ", "x|\n|a|s|s|i|s|t|a|n|t|:| |c|\n|</s>"]),
        ("<s>" + CHATML, [], [assistant("c")], ["<s>|<|im_start|>|a|s|s|i|s|t|a|n|t|\n", "c|<|im_end|>"]),
    ],
)
def test_conversations_without_a_prompt(
    template: str, prompt: list[Any], completion: list[Any], expected: list[str]
) -> None:
    """Other conversations are in ``test_data_golden.py``."""
    assert golden(char_tokenizer(template=template, before=BOS), prompt, completion) == expected
