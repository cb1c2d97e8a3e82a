"""Rows in every format of TRL's documentation, made from nineteen prompts with two completions each."""

from __future__ import annotations

import json
from typing import Any

Columns = dict[str, list[Any]]

STATEMENTS = (
    ("A short loop is easier to", " read than a long one.", " write in assembly."),
    ("Measure", " before you optimise.", " nothing."),
    ("A test that cannot fail", " proves nothing.", " is the best test."),
    ("Names", " are the cheapest documentation.", " should have one letter."),
    ("The fastest code is the code", " that never runs.", " that nobody has read at all."),
    ("Every option is a contract", " to keep.", " to break."),
    ("Delete what", " is not used.", " works."),
    ("Errors should say what", " to do next, and where it went wrong.", " they like."),
    ("A cache without a key is", " a bug with good performance.", " fine."),
    ("Write the example first, because the example", " is the interface.", " is never read by anybody."),
    ("Two copies of a rule will", " disagree one day.", " always agree."),
    ("Small batches", " show problems early.", " hide problems."),
    ("If it hurts, do it", " more often until it does not.", " never."),
    ("The log of yesterday", " explains the failure of today.", " is of no use."),
    ("Numbers without units are", " only decoration.", " numbers."),
    ("It is better to refuse", " than to guess.", " everything."),
    ("Old data is", " the hardest test of new code.", " bad data."),
    ("When the machine is slow, look at", " what it waits for.", " the wall."),
    ("Good defaults", " are options that nobody has to learn.", " do not exist."),
)
QUESTIONS = tuple(f"How does this continue: {prompt}" for prompt, _, _ in STATEMENTS)


def _said(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def _formats(asked: list[Any], good: list[Any], bad: list[Any]) -> dict[str, Columns]:
    """Return rows of prompts and completions, which can be added: configuration → column → values."""
    labels = [i % 2 == 0 for i in range(len(asked))]
    ends = [b if label else c for b, c, label in zip(good, bad, labels)]
    better, worse = [a + b for a, b in zip(asked, good)], [a + c for a, c in zip(asked, bad)]
    return {
        "language_modeling": {"text" if isinstance(better[0], str) else "messages": better},
        "prompt_only": {"prompt": asked},
        "prompt_completion": {"prompt": asked, "completion": good},
        "preference": {"prompt": asked, "chosen": good, "rejected": bad},
        "implicit_prompt_preference": {"chosen": better, "rejected": worse},
        "unpaired_preference": {"prompt": asked, "completion": ends, "label": labels},
    }


def standard() -> dict[str, Columns]:
    """Return rows of text."""
    return _formats(*(list(column) for column in zip(*STATEMENTS)))


def conversational() -> dict[str, Columns]:
    """Return rows of messages."""
    good, bad = ([[{"role": "assistant", "content": row[n].strip()}] for row in STATEMENTS] for n in (1, 2))
    return _formats([_said(question) for question in QUESTIONS], good, bad)


def zen() -> dict[str, Columns]:
    """Return all configurations of text and messages."""
    kinds = {"standard": standard(), "conversational": conversational()}
    return {f"{kind}_{name}": columns for kind, configs in kinds.items() for name, columns in configs.items()}


def harmony() -> dict[str, Columns]:
    """Return messages with ``thinking`` and template arguments."""
    efforts = [("low", "medium", "high")[i % 3] for i in range(len(STATEMENTS))]
    extra = {"chat_template_kwargs": [{"reasoning_effort": e, "model_identity": "You are tiny."} for e in efforts]}
    asked = [_said(question) for question in QUESTIONS]

    def answers(column: int) -> list[Any]:
        return [
            [{"role": "assistant", "thinking": f"It begins with {row[0].split()[0]}.", "content": row[column].strip()}]
            for row in STATEMENTS
        ]

    good, bad = answers(1), answers(2)
    return {
        "language_modeling": {"messages": [a + b for a, b in zip(asked, good)], **extra},
        "prompt_completion": {"prompt": asked, "completion": good, **extra},
        "preference": {"prompt": asked, "chosen": good, "rejected": bad, **extra},
    }


def _tool(name: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": f"the {key}"} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": schema}}


def _called(name: str, arguments: dict[str, Any], result: str, answer: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "name": name, "content": result},
        {"role": "assistant", "content": answer},
    ]


def toolcall() -> dict[str, Columns]:
    """Return messages with tool calls of different types, and the tools' schemas as JSON."""
    lift = _tool("move_lift", floor="integer")
    blinds = _tool("set_blinds", room="string", state="string")
    asked = [f"Take the lift to floor {i}." if i % 2 else f"Close the blinds of room {i}." for i in range(8)]
    good = [
        _called("move_lift", {"floor": i}, str(i), f"You are on floor {i}.")
        if i % 2
        else _called("set_blinds", {"room": f"room {i}", "state": "shut"}, "{'state': 'shut'}", "They are shut.")
        for i in range(8)
    ]
    bad = [_called("move_lift", {"floor": -i}, str(-i), "You are in the cellar.") for i in range(8)]
    prompts = [_said(question) for question in asked]
    tools = [json.dumps([lift] if i % 2 else [lift, blinds]) for i in range(8)]
    return {
        "language_modeling": {"messages": [a + b for a, b in zip(prompts, good)], "tools": tools},
        "preference": {"prompt": prompts, "chosen": good, "rejected": bad, "tools": tools},
    }


def reviews() -> Columns:
    """Return texts of a few hundred characters with a label."""
    texts = [" ".join(a + b for a, b, _ in STATEMENTS[i % 15 : i % 15 + 4]) for i in range(200)]
    return {"text": texts, "label": [i % 2 for i in range(200)]}


def of_scripts() -> dict[str, Columns]:
    """Return rows by the name of the dataset that TRL's example scripts use, with its columns."""
    chats = conversational()
    pairs, turns = chats["implicit_prompt_preference"], chats["language_modeling"]["messages"]
    scores = {"score_chosen": [8.0] * len(turns), "score_rejected": [3.5] * len(turns)}
    talks = {"source": ["Tiny"] * len(turns), "messages": turns, "num_turns": [2] * len(turns)}
    found = {"kto-mix-14k": chats["unpaired_preference"], "ultrafeedback_binarized": pairs | scores}
    found |= {"tldr": standard()["prompt_completion"], "Capybara": talks}
    return {f"trl-lib/{name}": {key: value * 6 for key, value in rows.items()} for name, rows in found.items()}


def texts() -> list[str]:
    """Return the texts on which tokenizers are trained."""
    whole = [text for prompt, good, bad in STATEMENTS for text in (prompt + good, prompt + bad)]
    calls = [str(column) for columns in toolcall().values() for column in columns.values()]
    words = "Hi Hello there yes no this is a very long prompt that fills up the whole max length budget on its own"
    return [*whole, *QUESTIONS, *calls, words, "You are a helpful assistant. system user assistant tool model"] * 2
