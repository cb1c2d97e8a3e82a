"""Combinations of raw rows, tokenizers and options for ``engine/test_end_to_end_oracle.py``."""

from __future__ import annotations

import random
from typing import Any

from support.data_tokenizers import CHATML, DEFAULT_SYSTEM, PLAIN, THINK, THINK_OPEN, char_tokenizer
from support.helpers import text
from support.oracle.first_window import Part
from support.oracle.rows import Setting, columns, read, tokens
from support.pairwise import Combination

POSITIONS = 600
PHI = CHATML.replace("assistant\n{% endif %}", "assistant\n{% else %}{{ eos_token }}{% endif %}")
TEMPLATES = {
    "none": None,
    "chatml": CHATML,
    "bos": "<s>" + CHATML,
    "think": THINK,
    "think open": THINK_OPEN,
    "default system": DEFAULT_SYSTEM,
    "phi": PHI,
    "no end": PLAIN,
}
TOKENIZERS: dict[str, dict[str, Any]] = {
    "bos": {"before": ("<s>",)},
    "bos unused": {},
    "eos is pad": {"bos": None, "pad": True},
    "neither": {"bos": None, "eos": None},
}
TEXTS = {"strings", "alpaca", "texts", "hh", "mixed", "text"}
PAIRED = {"pairs", "implicit", "texts", "hh", "repeated", "mixed"}
_PREFERENCES = ("strings", "messages", "sharegpt", "alpaca", "implicit", "texts", "hh", "single", "repeated")
FORMATS = {
    "kto": ("strings", "messages", "conversation", "sharegpt", "alpaca", "single", "pairs", "mixed", "implicit", "hh"),
    "cpo": _PREFERENCES,
    "dpo": _PREFERENCES,
    "reward": _PREFERENCES,
    "sft": ("strings", "messages", "conversation", "sharegpt", "alpaca", "single", "text"),
    "online_dpo": ("strings", "messages", "sharegpt", "alpaca", "single", "prefix"),
}
LOSSES: dict[str, tuple[dict[str, Any], ...]] = {
    "kto": (
        {},
        {"beta": 0.3, "desirable_weight": 1.5},
        {"loss_type": "apo_zero_unpaired", "beta": 0.05, "undesirable_weight": 0.5},
    ),
    "cpo": (
        {},
        {"loss_type": "sigmoid", "label_smoothing": 0.1, "cpo_alpha": 0.3, "beta": 0.2},
        {"loss_type": "hinge", "beta": 0.02},
        {"loss_type": "ipo", "beta": 0.5, "cpo_alpha": 0.0},
        {"loss_type": "simpo", "beta": 2.0, "label_smoothing": 0.2},
        {"loss_type": "simpo", "beta": 2.0, "gamma_beta_ratio": 0.4, "alpha": 0.1},
        {"loss_type": "alphapo", "beta": 2.0, "simpo_gamma": 0.7},
    ),
    "dpo": (
        {},
        {"label_smoothing": 0.2, "beta": 0.3},
        {"loss_type": "hinge", "beta": 0.02},
        {"loss_type": "ipo", "beta": 0.4},
    ),
    "reward": ({}, {"center_rewards_coefficient": 0.05}),
    "sft": ({}, {"loss_type": "dft"}),
    "online_dpo": ({}, {"loss_type": "ipo", "beta": 0.3}, {"beta": [0.2, 0.4]}),
}


def factors(method: str) -> dict[str, tuple[Any, ...]]:
    """Return the factors of a method."""
    found: dict[str, tuple[Any, ...]] = {
        "format": FORMATS[method],
        "template": tuple(TEMPLATES),
        "tokenizer": tuple(TOKENIZERS),
        "odd": ("nothing", "identical", "empty completion", "empty prompt", "wrong role", "unknown role"),
        "max_length": ("free", "at", "above", "below", "short", "long", "null"),
        "mixture": ("none", "sizes", "weights"),
        "max_train_samples": (None, 7),
        "batch": ((1, 4), (2, 2), (4, 1), (2, 3)),
        "order": ("random", "sequential"),
        "loss": tuple(range(len(LOSSES[method]))),
    }
    if method == "online_dpo":
        found["max_length"] = found["max_length"][:-1]  # cannot be null
        found |= {"num_generations": (2, 3), "missing_eos_penalty": (None, 0.5)}
    else:
        found |= {
            "max_prompt_length": ("unset", 5, 512),
            "max_completion_length": (None, 14),
            "truncation_mode": ("unset", "keep_start", "keep_end"),
        }
    if method in ("kto", "dpo"):
        found["ref_placement"] = ("replica", "precomputed")
    if method == "kto":
        found["stratify_labels"] = (False, True)
    if method == "sft":
        found |= {"completion_only_loss": (None, True, False), "assistant_only_loss": (False, True)}
    return found


def allowed(case: Combination) -> bool:
    """Exclude combinations that do not exist, or that are refused for a reason which other tests cover."""
    chats, odd = case["format"] not in TEXTS, case["odd"]
    return (
        (not chats or case["template"] != "none")
        and (chats or "role" not in odd)
        and (odd != "empty prompt" or case["format"] not in ("alpaca", "single", "sharegpt"))
        and (not case.get("assistant_only_loss") or (chats and case["template"] not in ("no end", "think open")))
        and not (case.get("assistant_only_loss") and case["template"] == "think" and odd == "empty prompt")
        and not (case.get("stratify_labels") and case["order"] == "sequential")
        and (case["format"] != "text" or not case.get("completion_only_loss"))
    )


def tokenizer_of(case: Combination) -> Any:
    """Return the tokenizer of a case."""
    made = dict(TOKENIZERS[case["tokenizer"]])
    pad = made.pop("pad", False)
    tokenizer = char_tokenizer(template=TEMPLATES[case["template"]], **made)
    if pad:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def said(role: str, content: Any) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content}


def turn(speaker: str, value: str) -> dict[str, str]:
    """A turn of ShareGPT."""
    return {"from": speaker, "value": value}


def raw_row(method: str, form: str, rng: random.Random, odd: str, long: tuple[int, int] | None) -> dict[str, Any]:
    """Return one row of a format."""
    asked, good, bad = (" ".join(text(rng, 2, most) for _ in range(2)) for most in (8, 16, 16))
    asked, good = (asked + "a", "b" + good) if rng.random() < 0.3 else (asked, good)  # a token across the boundary
    if long:
        asked, good = text(rng, long[0], long[0]), text(rng, long[1], long[1])
    bad = good if odd == "identical" else bad
    good = "" if odd == "empty completion" else good
    asked = "" if odd == "empty prompt" else asked
    asker = "usre" if odd == "unknown role" else "user"
    answerer = "user" if odd == "wrong role" else "assistant"
    labeled = {"label": rng.random() < 0.5} if method == "kto" else {}
    more = {"margin": round(rng.random(), 3)} if method == "reward" and rng.random() < 0.5 else {}
    question = [] if odd == "empty prompt" else [said(asker, asked)]
    pairs = method in ("cpo", "dpo", "reward")
    sides = {"chosen": good, "rejected": bad}
    replies = {side: [said(answerer, content)] for side, content in sides.items()}
    if form in ("pairs", "repeated") or (form == "messages" and pairs):
        before = [said("system", "be kind"), *question] if rng.random() < 0.3 else question
        repeated = before if form == "repeated" else []
        return {"prompt": before, **{side: [*repeated, *reply] for side, reply in replies.items()}, **more}
    if form == "implicit":
        return {side: [*question, *reply] for side, reply in replies.items()} | more
    if form == "texts":
        return {side: f"{asked} {content}" for side, content in sides.items()} | more
    if form == "hh":
        return {side: f"\n\nHuman: {asked}\n\nAssistant: {content}" for side, content in sides.items()} | more
    if form == "mixed" and (odd == "identical" or rng.random() < 0.5):
        return {"prompt": asked, **sides}
    answers = {side: turn("human" if answerer == "user" else "gpt", content) for side, content in sides.items()}
    asking = turn("human" if asker == "user" else asker, asked)
    if form == "sharegpt":
        if method in ("kto", "sft"):
            return {"conversations": [asking, answers["chosen"]], "system": "be kind", "tag": labeled.get("label")}
        system = {} if pairs else {"system": "be kind"}
        return {"conversations": [asking], **system, **(answers if pairs else {}), **more}
    if form == "alpaca":
        given = sides if pairs else {} if method == "online_dpo" else {"output": good, "tag": labeled.get("label")}
        return {"instruction": asked, "input": rng.choice(["", "x y"]), **given, **more}
    if form == "conversation":
        earlier = [said("user", "hi"), said("assistant", "ho")] if rng.random() < 0.5 else []
        return {"messages": [*earlier, *question, *replies["chosen"]], **labeled}
    if form == "text":
        return {"text": good}
    if form == "prefix":
        return {"prompt": [*question, said("assistant", good)]}
    prompt: Any = asked if form in TEXTS else question
    if form == "single":
        prompt = said(asker, [{"type": "text", "text": asked}])
    answer = {side: reply[0] for side, reply in replies.items()} if form == "single" else replies
    answer = sides if form in TEXTS else answer
    given = answer if pairs else {} if method == "online_dpo" else {"completion": answer["chosen"]}
    return {"prompt": prompt, **given, **labeled, **more}


COLUMN_MAPS = {
    ("sharegpt", "kto"): {"messages": "conversations", "label": "tag", "system": "system"},
    ("sharegpt", "sft"): {"messages": "conversations", "system": "system"},
    ("sharegpt", "online_dpo"): {"prompt": "conversations", "system": "system"},
    ("sharegpt", ""): {"prompt": "conversations"},
    ("alpaca", "kto"): {"prompt": "instruction", "query": "input", "completion": "output", "label": "tag"},
    ("alpaca", "sft"): {"prompt": "instruction", "query": "input", "completion": "output"},
    ("alpaca", ""): {"prompt": "instruction", "query": "input"},
}


def parts_of(method: str, case: Combination) -> list[Part]:
    """Return the datasets of a case; the second one of a mixture has plain columns."""
    rng, form, odd = random.Random(repr((method, sorted(case.items(), key=repr)))), case["format"], case["odd"]
    long = {"long": (530, 50), "null": (560, 110)}.get(case["max_length"])
    odd = "nothing" if odd == "identical" and method in ("sft", "online_dpo") else odd
    rows = [raw_row(method, form, rng, odd if n in (1, 4) else "nothing", long if n == 2 else None) for n in range(9)]
    column_map = COLUMN_MAPS.get((form, method), COLUMN_MAPS.get((form, ""), {}))
    weights = (3.0, 1.0) if case["mixture"] == "weights" else (None, None)
    parts = [Part(rows, column_map, weights[0])]
    if case["mixture"] != "none":
        plain = "messages" if case.get("assistant_only_loss") else "strings"
        parts.append(Part([raw_row(method, plain, rng, "nothing", None) for _ in range(14)], {}, weights[1]))
    return parts


def options_of(method: str, case: Combination, parts: list[Part], tokenizer: Any) -> dict[str, Any]:
    """Return the options of a case; borders of ``max_length`` are those of its longest row."""
    options = dict(LOSSES[method][case["loss"]])
    names = ("max_train_samples", "num_generations", "missing_eos_penalty", "ref_placement", "stratify_labels")
    names += ("max_completion_length", "completion_only_loss", "assistant_only_loss")
    options |= {name: case[name] for name in names if name in case}
    options |= {
        name: case[name] for name in ("max_prompt_length", "truncation_mode") if case.get(name, "unset") != "unset"
    }
    new = {"max_new_tokens": 12} if method == "online_dpo" else {}
    free = Setting(method, {**options, **new}, tokenizer, 10**9)
    lengths = [0]
    if case["odd"] not in ("wrong role", "unknown role"):
        said = [read(columns(row, part.column_map), free) for part in parts for row in part.rows]
        made = [tokens(one, free) for one in said if one is not None]
        lengths = [len(one.prompt) + max(map(len, one.completions), default=0) for one in made]
    longest = max(lengths) + new.get("max_new_tokens", 0)
    borders = {"free": 200, "at": longest, "above": longest - 1, "below": longest + 1, "long": 560, "null": None}
    borders |= {"short": longest // 2 + 6} if longest < POSITIONS else {}
    options["max_length"] = borders.get(case["max_length"], 30)
    if longest < 20 and case["max_length"] in ("at", "above", "below", "short"):
        options["max_length"] = 40
    options["per_device_train_batch_size"], options["gradient_accumulation_steps"] = case["batch"]
    return {**options, **new, "train_sampling_strategy": case["order"]}
