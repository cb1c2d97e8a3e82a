"""From raw rows to the token IDs that a run trains on: columns, formats, templates, truncation, dropped rows.

Written from docs/guides/data.md, the guides of the methods and the help texts, without importing the package. It
covers texts and conversations of tokenizers whose special tokens are never part of ordinary text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

Text = str | list[dict[str, Any]]
Row = Mapping[str, Any]
SPEAKERS = {"human": "user", "gpt": "assistant", "observation": "tool"}
ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
HH_TURN = "\n\nAssistant:"
MARK = "MARKOFTHELASTMESSAGE"
# Defaults in docs/reference/options.md.
DEFAULTS = {"max_length": 1024, "truncation_mode": "keep_end"}


class Refused(Exception):
    """The data cannot be used: the run must end with an error before training."""


@dataclass(frozen=True)
class Setting:
    """What a row is processed with: method, options by name, tokenizer, and the positions of the models."""

    method: str
    options: Mapping[str, Any]
    tokenizer: Any
    positions: int

    def __getitem__(self, name: str) -> Any:
        default = "keep_start" if (self.method, name) == ("dpo", "truncation_mode") else DEFAULTS.get(name)
        value = self.options.get(name, default)
        return self.positions if name == "max_length" and value is None else value


@dataclass(frozen=True)
class Said:
    """A row in one form: ``whole`` if SFT also learns the prompt, ``margin`` of a reward model's pair."""

    prompt: Text
    completions: tuple[Text, ...]
    label: bool | None = None
    margin: float = 0.0
    whole: bool = False


@dataclass(frozen=True)
class Example:
    """Token IDs of a row: ``requested`` is the prompt before truncation, ``learned`` the mask of an SFT completion."""

    prompt: list[int]
    completions: tuple[list[int], ...]
    label: bool | None = None
    margin: float = 0.0
    learned: list[bool] = field(default_factory=list)
    requested: tuple[int, ...] = ()
    prompt_cut: bool = False
    completions_cut: int = 0


def examples(rows: Sequence[Row], column_map: Mapping[str, str], setting: Setting) -> dict[tuple[int, Any], Example]:
    """Return the examples of a dataset by (number of the row, label); dropped rows are missing."""
    found = {}
    for number, row in enumerate(rows):
        said = read(columns(row, column_map), setting)
        whole = [] if said is None else [tokens(said, setting)]
        if setting.method == "kto" and whole and len(whole[0].completions) == 2:  # becomes two rows
            sides = zip(whole[0].completions, (True, False))
            whole = [replace(whole[0], completions=(one,), label=label) for one, label in sides]
        made = [example for one in whole if (example := fitted(one, setting))]
        if len(made) < 2 or made[0].completions != made[1].completions:
            found |= {(number, one.label): one for one in made}
    return found


def columns(row: Row, column_map: Mapping[str, str]) -> dict[str, Any]:
    """Apply ``column_map``; ``query`` and ``system`` are only read if they are mapped."""
    own = {name: value for name, value in row.items() if name not in ("query", "system")}
    return {**own, **{name: row.get(column) for name, column in column_map.items()}}


def read(row: Row, setting: Setting) -> Said | None:
    """Return a row in one form, or None for a pair with identical completions."""
    method = setting.method
    if method == "online_dpo":
        return Said(_prompt(row, setting), ())
    if row.get("chosen") is not None:
        pair = _pair(row, setting)
        return None if pair.completions[0] == pair.completions[1] else pair
    label = row.get("label") if method == "kto" else None
    only = setting["completion_only_loss"] if method == "sft" else True
    if row.get("completion") is not None:
        completion = _text(row["completion"], setting)
        _ends_well(completion)
        return Said(_prompt(row, setting), (completion,), label, whole=only is False)
    if row.get("text") is not None:
        return Said("", (row["text"],), whole=True)
    messages = _with_system(_text(row["messages"], setting), row)
    if method == "sft" and not only:
        return Said([], (messages,), whole=True)
    _ends_well(messages)
    return Said(messages[:-1], (messages[-1:],), label)


def _pair(row: Row, setting: Setting) -> Said:
    sides = [_text(row[side], setting) for side in ("chosen", "rejected")]
    margin = float(row.get("margin") or 0)
    if row.get("prompt") is not None:
        prompt = _prompt(row, setting)
        repeated = [not isinstance(prompt, str) and side[: len(prompt)] == prompt for side in sides]
        sides = [side[len(prompt) :] if again else side for side, again in zip(sides, repeated)]
    elif sides[0] == sides[1]:
        prompt = ""
    else:
        shared = _shared(*sides)
        prompt, sides = sides[0][:shared], [side[shared:] for side in sides]
        prompt = prompt if isinstance(prompt, str) else _with_system(prompt, row)
    for side in sides:
        _ends_well(side)
    return Said(prompt, (sides[0], sides[1]), margin=margin)


def _shared(chosen: Text, rejected: Text) -> int:
    """Return the length of the implicit prompt: messages, or a text up to its last common turn or whitespace."""
    most = min(len(chosen), len(rejected)) - 1  # something is left of both
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        return len(list(takewhile(lambda number: chosen[number] == rejected[number], range(most))))
    common = os.path.commonprefix([chosen, rejected])
    turns = [end for end in range(1, most + 1) if common[:end].endswith(HH_TURN)]
    if turns:
        return turns[-1]
    spaces = [at for at in range(min(len(common), most) + 1) if chosen[at] == rejected[at] == " "]
    return next((at for at in reversed(spaces) if at == 0 or chosen[at - 1] != " "), 0)


def _text(value: Any, setting: Setting) -> Any:
    if isinstance(value, str):
        return value
    return [_message(each, setting) for each in ([value] if isinstance(value, Mapping) else value)]


def _message(given: Row, setting: Setting) -> dict[str, Any]:
    role = given.get("role") or SPEAKERS.get(given["from"], given["from"])
    content = given["value"] if "from" in given else given["content"]
    if role not in ROLES and role not in str(setting.tokenizer.chat_template):
        raise Refused(f"unknown role {role}")
    return {"role": role, "content": content if isinstance(content, str) else "".join(p["text"] for p in content)}


def _prompt(row: Row, setting: Setting) -> Text:
    prompt = _text(row["prompt"], setting)
    return f"{prompt}\n{row['query']}" if row.get("query") else _with_system(prompt, row)


def _with_system(messages: Any, row: Row) -> Any:
    return [{"role": "system", "content": row["system"]}, *messages] if row.get("system") else messages


def _ends_well(completion: Any) -> None:
    """Only the assistant's messages are completions."""
    if not isinstance(completion, str) and completion[-1]["role"] != "assistant":
        raise Refused(f"a completion by {completion[-1]['role']}")


def tokens(said: Said, setting: Setting) -> Example:
    """Return the token IDs of a row before truncation. The prompt is empty if there is no token to start from."""
    tokenizer, method = setting.tokenizer, setting.method
    if isinstance(said.prompt, str):
        leading = list(tokenizer("x")["input_ids"])[: -len(_ids(tokenizer, "x"))]  # the tokens added before a text
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        start = leading + _ids(tokenizer, said.prompt)
        full = [leading + _ids(tokenizer, said.prompt + str(text)) + end for text in said.completions]
    else:
        start = _rendered_prompt(said, tokenizer)
        full = [_conversation([*said.prompt, *more], tokenizer, method != "reward") for more in said.completions]
    # The model would have to generate a token across the boundary, so it belongs to the completion.
    border = len(list(takewhile(lambda column: len(set(column)) == 1, zip(start, *full))))
    prompt, completions = start[:border], [ids[border:] for ids in full]
    if not prompt and method != "reward" and (not completions or all(completions)):
        if completions and len({ids[0] for ids in completions}) == 1:  # the first token is context
            prompt, completions = completions[0][:1], [ids[1:] for ids in completions]
        else:
            context = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
            prompt = [] if context is None else [context]
    example = Example(prompt, tuple(completions), said.label, said.margin, requested=tuple(prompt))
    return _learned(example, said, setting) if method == "sft" else example


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _render(tokenizer: Any, messages: list[dict[str, Any]], **options: bool) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def _rendered_prompt(said: Said, tokenizer: Any, continues: bool = True) -> list[int]:
    """Render the prompt with the generation prompt; that of an empty list is what precedes the first content."""
    prompt: list[Any] = list(said.prompt)
    if continues and prompt and prompt[-1]["role"] == "assistant":  # a reply to continue
        return _ids(tokenizer, _render(tokenizer, prompt, continue_final_message=True))
    if prompt:
        return _ids(tokenizer, _render(tokenizer, prompt, add_generation_prompt=True))
    first: list[Any] = list(said.completions[0]) if said.completions else [{"role": "assistant"}]
    text = _render(tokenizer, [{**first[0], "content": MARK}, *first[1:]])
    return _ids(tokenizer, text.partition(MARK)[0])


def _conversation(messages: list[Any], tokenizer: Any, stops: bool) -> list[int]:
    """Render a conversation; if it ``stops``, up to the end-of-turn token after the last message, or with EOS."""
    ids = _ids(tokenizer, _render(tokenizer, messages))
    if not stops:
        return ids
    after = _ids(tokenizer, _render(tokenizer, [*messages[:-1], {**messages[-1], "content": MARK}]).partition(MARK)[2])
    ends = [place for place, token in enumerate(after) if token in tokenizer.all_special_ids]
    if ends:
        return ids[: len(ids) - len(after) + ends[0] + 1]
    return ids if tokenizer.eos_token_id is None else [*ids, tokenizer.eos_token_id]


def _learned(example: Example, said: Said, setting: Setting) -> Example:
    """Divide a row of SFT before its first learned token. The very first token is never learned."""
    whole = [*example.prompt, *example.completions[0]]
    places = set(range(1 if said.whole else len(example.prompt), len(whole)))
    if setting["assistant_only_loss"]:
        places &= _turns([*said.prompt, *said.completions[0]], whole, setting.tokenizer)
    first = min(places - {0}, default=len(whole))
    learned = [place in places for place in range(first, len(whole))]
    return replace(example, prompt=whole[:first], completions=(whole[first:],), learned=learned)


def _turns(messages: list[Any], ids: list[int], tokenizer: Any) -> set[int]:
    """Return the places of the assistant's tokens: what follows the generation prompt, up to the end of the turn."""
    places: set[int] = set()
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(_rendered_prompt(Said(messages[:number], (messages[number:],)), tokenizer, continues=False))
            end = next(place for place in range(start, len(ids)) if ids[place] in tokenizer.all_special_ids)
            places |= set(range(start, end + 1))
    return places


def fitted(example: Example, setting: Setting) -> Example | None:
    """Return the row truncated to the limits, or None if it is dropped."""
    prompt, completions, longest = example.prompt, list(example.completions), setting["max_length"]
    if setting.method == "online_dpo":
        return example if 0 < len(prompt) <= longest - setting["max_new_tokens"] else None
    if setting["max_completion_length"] is not None:
        completions = [ids[: setting["max_completion_length"]] for ids in completions]
    most = setting["max_prompt_length"]
    if most is None and setting.method in ("kto", "cpo") and len(prompt) + max(map(len, completions)) > longest:
        most = 512 if longest > 512 else longest // 2
    if most is not None and len(prompt) > most:
        head = prompt[:1] if prompt[0] == setting.tokenizer.bos_token_id else []
        ends = setting["truncation_mode"] == "keep_end"
        prompt = [*head, *prompt[len(prompt) - most + len(head) :]] if ends else prompt[:most]
    completions = [ids[: max(0, longest - len(prompt))] for ids in completions]
    learned = example.learned[: len(completions[0])]
    if not all(completions) or not (prompt or setting.method == "reward") or completions[1:] == completions[:1]:
        return None
    if setting.method == "sft" and not any(learned):
        return None
    cut = sum(len(new) < len(old) for new, old in zip(completions, example.completions))
    made = replace(example, prompt=prompt, completions=tuple(completions), learned=learned)
    return replace(made, prompt_cut=prompt != example.prompt, completions_cut=cut)
