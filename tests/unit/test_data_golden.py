"""Golden tokenizations of all row formats in ``data/tokenization.txt``, a human-readable table.

``python tests/unit/test_data_golden.py`` regenerates the table; review the changes before committing them.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]

from support.data_tokenizers import (  # noqa: E402
    CHATML,
    DEFAULT_SYSTEM,
    ENDED,
    MARKED,
    PLAIN,
    THINK,
    THINK_OPEN,
    TOOLS,
    readable_tokenizer,
)
from support.prepared import prepared  # noqa: E402

from alignment.data.kinds.completions import COMPLETIONS, Completions  # noqa: E402
from alignment.data.kinds.pairs import PAIRS  # noqa: E402
from alignment.data.kinds.prompts import PROMPTS  # noqa: E402
from alignment.data.kinds.scored_pairs import SCORED_PAIRS  # noqa: E402
from alignment.data.kinds.unpaired import UNPAIRED  # noqa: E402

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "tokenization.txt"
HEAD = """\
The tokens of a row. Tokens are divided by |, the prompt from the completion by ||; only what is right of || is
trained on, and of that nothing in brackets. · is a space, ⏎ a line break. Of a labeled answer the sign says whether
it is desirable; of a pair, + is the chosen answer and - the rejected one. "no BOS": the tokenizer adds none to plain
text; a template may. After ? is a prompt alone, which the policy continues, and
below it what a reward function is told.
Written by tests/unit/test_data_golden.py.
"""
TOKENIZERS: dict[str, Any] = {
    "no template, no BOS": {},
    "no template, BOS": {"bos": True},
    "ChatML": {"template": CHATML},
    "ChatML that marks the assistant's turns": {"template": MARKED},
    "ChatML that adds BOS": {"template": "<s>" + CHATML, "bos": True},
    "role: content lines, which end no turn": {"template": PLAIN},
    "ChatML with a default system turn": {"template": DEFAULT_SYSTEM},
    "ChatML with tools": {"template": TOOLS},
    "ChatML that ends conversations with EOS": {"template": ENDED},
    "think block in every last answer": {"template": THINK},
    "think block opened by the generation prompt": {"template": THINK_OPEN},
}
NAMED = Completions(text_field="said")
U, A, B = "what is the cat", "the cat is red", "no"
NO = f"{U} {B}"


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content, **more}


def turn(speaker: str, value: str) -> dict[str, str]:
    """A ShareGPT turn."""
    return {"from": speaker, "value": value}


USER, GOOD, BAD = said("user", U), said("assistant", A), said("assistant", B)
CALL = {"type": "function", "function": {"name": "cat", "arguments": {"on": "mat"}}}
TOOL = {"type": "function", "function": {"name": "cat"}}


@dataclass(frozen=True)
class Case:
    """Rows of one format, which give one block of the table."""

    title: str
    kind: Any
    tokenizer: str
    rows: tuple[dict[str, Any], ...]
    column_map: dict[str, str]
    apply_chat_template: bool = False


def case(title: str, kind: Any, tokenizer: str, *rows: dict[str, Any], **column_map: str) -> Case:
    """A case with these rows."""
    return Case(title, kind, tokenizer, rows, column_map)


def labeled(title: str, tokenizer: str, prompt: Any, completion: Any, **more: Any) -> Case:
    """A case with one desirable row."""
    return row(title, UNPAIRED, tokenizer, prompt=prompt, completion=completion, label=True, **more)


def row(title: str, kind: Any, tokenizer: str, **columns: Any) -> Case:
    """A case with one row."""
    return case(title, kind, tokenizer, columns)


ALPACA = {"prompt": "instruction", "query": "input", "completion": "output", "label": "kto_tag"}
ALPACA_ROWS = (
    {"instruction": "what is", "input": "the cat", "output": A, "kto_tag": True},
    {"instruction": "what is the cat", "input": "", "output": " " + B, "kto_tag": False},
)
SHAREGPT = {"messages": "conversations", "label": "kto_tag"}
SHAREGPT_PAIR = {"conversations": [turn("human", U)], "chosen": turn("gpt", A), "rejected": turn("gpt", B)}
SHAREGPT_TURNS = [turn("human", U), turn("gpt", A)]
SHAREGPT_CALLS = [
    turn("human", U),
    turn("function_call", '{"name": "cat", "arguments": {"on": "mat"}}'),
    turn("observation", "red"),
    turn("gpt", A),
]
HH = "\n\nHuman: what is the cat\n\nAssistant:"
CALLS = said("assistant", None, tool_calls=[CALL])
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
SEVERAL = [USER, BAD, USER, GOOD]
PLAIN_PAIR = {"prompt": U, "chosen": " " + A, "rejected": " " + B}
CHAT = {"prompt": [USER], "completion": [GOOD]}
CHAT_PAIR = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
WHOLE_PAIR = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
ASSISTANT = Completions(assistant_only=True)
CASES = [
    labeled("KTO, strings", "no template, no BOS", U, " " + A),
    labeled("KTO, strings", "no template, BOS", U, " " + A),
    labeled("KTO, a token that would merge across the border", "no template, no BOS", "what is th", "e cat"),
    labeled("KTO, empty prompt", "no template, BOS", "", A),
    labeled("KTO, empty prompt and no BOS: the first token is context", "no template, no BOS", "", A),
    labeled("KTO, messages", "ChatML", [USER], [GOOD]),
    replace(labeled("KTO, strings as turns", "ChatML", U, A), apply_chat_template=True),
    labeled("KTO, messages", "ChatML that adds BOS", [USER], [GOOD]),
    labeled("KTO, messages", "role: content lines, which end no turn", [USER], [GOOD]),
    labeled("KTO, messages", "ChatML that ends conversations with EOS", [USER, BAD, USER], [GOOD]),
    labeled("KTO, one message that is not in a list", "ChatML", [USER], GOOD),
    labeled("KTO, empty list as prompt", "ChatML", [], [GOOD]),
    labeled("KTO, system turn", "ChatML with a default system turn", [said("system", "say yes"), USER], [GOOD]),
    labeled("KTO, the template's own system turn", "ChatML with a default system turn", [USER], [GOOD]),
    labeled("KTO, the answer that the prompt begins", "ChatML", [USER, said("assistant", "the")], [GOOD]),
    labeled("KTO, several turns", "ChatML", [USER, BAD, said("user", "say yes")], [said("assistant", "yes")]),
    labeled("KTO, content in parts", "ChatML", [said("user", [{"type": "text", "text": U}])], [GOOD]),
    labeled("KTO, tools", "ChatML with tools", [USER], [GOOD], tools=[TOOL]),
    labeled("KTO, tools as a JSON text", "ChatML with tools", [USER], [GOOD], tools=json.dumps([TOOL])),
    labeled("KTO, a call of a tool", "ChatML with tools", [USER], [CALLS], tools=[TOOL]),
    labeled("KTO, an answer after the tool's", "ChatML with tools", [USER, CALLS, said("tool", "red")], [GOOD]),
    labeled("KTO, think block", "think block in every last answer", [USER], [GOOD]),
    labeled("KTO, chat_template_kwargs", "think block in every last answer", [USER], [GOOD], **NO_THINKING),
    labeled("KTO, generation prompt that is no prefix", "think block opened by the generation prompt", [USER], [GOOD]),
    case("KTO, messages and label", UNPAIRED, "ChatML", {"messages": [USER, BAD], "label": False}),
    row("KTO, a pair", UNPAIRED, "ChatML", **CHAT_PAIR),
    case(
        "KTO, labeled rows and pairs in one file", UNPAIRED, "no template, no BOS",
        {"prompt": U, "completion": " " + B, "label": False}, PLAIN_PAIR,
    ),
    case(
        "KTO, columns as LLaMA-Factory's Alpaca files have them", UNPAIRED, "no template, no BOS",
        *ALPACA_ROWS, **ALPACA,
    ),
    case(
        "KTO, columns as LLaMA-Factory's ShareGPT files have them", UNPAIRED, "ChatML",
        {"conversations": SHAREGPT_TURNS, "system": "say yes", "kto_tag": True}, **SHAREGPT, system="system",
    ),
    case(
        "KTO, ShareGPT's calls of functions", UNPAIRED, "ChatML with tools",
        {"conversations": SHAREGPT_CALLS, "kto_tag": True}, **SHAREGPT,
    ),
    row("CPO, strings", PAIRS, "no template, no BOS", **PLAIN_PAIR),
    row("CPO, no prompt: it is what both begin with", PAIRS, "no template, BOS", chosen=f"{U} {A}", rejected=NO),
    row("CPO, no prompt, one answer begins the other", PAIRS, "no template, BOS", chosen=f"{NO} red", rejected=NO),
    row("CPO, Anthropic's HH texts", PAIRS, "no template, BOS", chosen=f"{HH} {A}", rejected=f"{HH} {B}"),
    row("CPO, messages", PAIRS, "ChatML", **CHAT_PAIR),
    row("CPO, messages", PAIRS, "ChatML that ends conversations with EOS", **CHAT_PAIR),
    row("CPO, messages without a prompt", PAIRS, "ChatML", **WHOLE_PAIR),
    row("CPO, single messages without a prompt", PAIRS, "ChatML", chosen=[GOOD], rejected=[BAD]),
    row("CPO, answers that repeat the prompt", PAIRS, "ChatML", prompt=[USER], **WHOLE_PAIR),
    case(
        "CPO, columns as LLaMA-Factory's ShareGPT files have them", PAIRS, "ChatML",
        SHAREGPT_PAIR, prompt="conversations",
    ),
    row("SFT, prompt and completion", COMPLETIONS, "ChatML", **CHAT),
    row("SFT, a conversation", COMPLETIONS, "ChatML", messages=[USER, GOOD]),
    row("SFT, text", COMPLETIONS, "no template, BOS", text=A),
    row("SFT, text in another column", NAMED, "no template, BOS", said=A),
    row("SFT, the prompt too", Completions(completion_only=False), "ChatML", **CHAT),
    row("SFT, the last answer of a conversation", Completions(completion_only=True), "ChatML", messages=SEVERAL),
    row("SFT, ShareGPT's turns", COMPLETIONS, "ChatML", conversations=SHAREGPT_TURNS),
    row("SFT, what the assistant says", ASSISTANT, "ChatML", messages=SEVERAL),
    row("SFT, what the assistant says", ASSISTANT, "ChatML that marks the assistant's turns", messages=SEVERAL),
    row("SFT, what the assistant says", ASSISTANT, "think block in every last answer", messages=SEVERAL),
    row("SFT, a conversation", COMPLETIONS, "ChatML that ends conversations with EOS", messages=[USER, GOOD]),
    row("SFT, what the assistant says", ASSISTANT, "ChatML that ends conversations with EOS", messages=SEVERAL),
    row(
        "SFT, what the assistant says in a completion of several turns", ASSISTANT, "ChatML",
        prompt=[USER, BAD, USER], completion=[GOOD, USER, BAD],
    ),
    row("Reward model, strings", SCORED_PAIRS, "no template, no BOS", **PLAIN_PAIR),
    row("Reward model, messages with a margin", SCORED_PAIRS, "ChatML", **WHOLE_PAIR, margin=0.5),
    row("Reward model, messages", SCORED_PAIRS, "ChatML that ends conversations with EOS", **WHOLE_PAIR),
    row("Online DPO, a string", PROMPTS, "no template, no BOS", prompt=U),
    row("Online DPO, a string", PROMPTS, "no template, BOS", prompt=U),
    row("Online DPO, empty prompt", PROMPTS, "no template, BOS", prompt=""),
    row("Online DPO, empty prompt and no BOS", PROMPTS, "no template, no BOS", prompt=""),
    row("Online DPO, messages", PROMPTS, "ChatML", prompt=[USER]),
    row("Online DPO, messages", PROMPTS, "ChatML that ends conversations with EOS", prompt=[USER]),
    row("Online DPO, one message that is not in a list", PROMPTS, "ChatML that adds BOS", prompt=USER),
    row("Online DPO, empty list as prompt", PROMPTS, "ChatML", prompt=[]),
    row("Online DPO, the template's own system turn", PROMPTS, "ChatML with a default system turn", prompt=[USER]),
    row("Online DPO, a completion to continue", PROMPTS, "ChatML", prompt=[USER, said("assistant", "the cat")]),
    row("Online DPO, tools", PROMPTS, "ChatML with tools", prompt=[USER], tools=[TOOL]),
    row("Online DPO, chat_template_kwargs", PROMPTS, "think block in every last answer", prompt=[USER], **NO_THINKING),
    row("Online DPO, think block opened", PROMPTS, "think block opened by the generation prompt", prompt=[USER]),
    row(
        "Online DPO, other columns", PROMPTS, "no template, no BOS",
        prompt=U, completion="red", label=True, system="a column",
    ),
    case(
        "Online DPO, columns with other names", PROMPTS, "ChatML",
        {"conversations": [turn("human", U)], "system": "say yes", "prompt": "not this", "answer": ["red"]},
        prompt="conversations", system="system",
    ),
]  # fmt: skip


def pieces(tokenizer: Any, ids: list[int]) -> str:
    """Render token IDs as text in which every token is visible."""
    shown = (tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in ids)
    return "|".join(text.replace(" ", "·").replace("\n", "⏎") for text in shown)


def _answers(tokenizer: Any, row: dict[str, Any]) -> Iterator[str]:
    prompt = pieces(tokenizer, row["prompt_ids"])
    if "columns" in row:
        yield from (f"  ? {prompt}", f"    {row['prompt']}, template {row['template']}, columns {row['columns']}")
    for name in ("completion_ids", "chosen_ids", "rejected_ids"):
        if name in row:
            sign = "-" if name == "rejected_ids" or row.get("label") is False else "+"
            yield f"  {sign} {prompt} || {_learned(tokenizer, row[name], row.get('scored'))}"
    if "margin" in row:
        yield f"    margin {row['margin']}"


def _learned(tokenizer: Any, ids: list[int], scored: list[bool] | None) -> str:
    """Render token IDs, with tokens outside of the loss in brackets."""
    shown = [pieces(tokenizer, [token]) for token in ids]
    return "|".join(text if kept else f"[{text}]" for text, kept in zip(shown, scored or [True] * len(ids)))


def block(one: Case, folder: Path) -> str:
    """Return a case's block of the table."""
    tokenizer = readable_tokenizer(**TOKENIZERS[one.tokenizer])
    options = {"column_map": one.column_map, "apply_chat_template": one.apply_chat_template}
    dataset = prepared([*one.rows], one.kind, folder, tokenizer, **options).dataset
    lines = [line for row in dataset for line in _answers(tokenizer, row)]
    given = [f"  {json.dumps(row)}" for row in one.rows]
    renamed = [f"  column_map: {json.dumps(one.column_map)}"] if one.column_map else []
    renamed += ["  apply_chat_template: true"] if one.apply_chat_template else []
    return "\n".join([f"{one.title} ({one.tokenizer})", *given, *renamed, *lines]) + "\n"


def table(folder: Path) -> str:
    """Return the complete table."""
    return "\n".join([HEAD, *(block(one, folder) for one in CASES)])


def test_the_table_matches_the_code(tmp_path: Path) -> None:
    difference = "\n".join(
        difflib.unified_diff(GOLDEN.read_text("utf-8").splitlines(), table(tmp_path).splitlines(), GOLDEN.name, "code")
    )
    assert not difference, f"rows are tokenized differently; if that is intended, run python {__file__}\n{difference}"


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        GOLDEN.write_text(table(Path(scratch)), "utf-8")
