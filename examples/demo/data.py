"""Training and held-out requests, the rows of each method, and a tokenizer for them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import Qwen2Tokenizer

from examples.demo.grammar import FRAMES, Manner, Request, all_requests, answer

Row = dict[str, Any]

END = "<|end|>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_VOCABULARY = 1024  # maximum size; the world has fewer words


@dataclass(frozen=True)
class World:
    """The requests of one seed: no combination of subject, wording and name is in both lists."""

    training: list[Request]
    held_out: list[Request]


def make_world(seed: int, held_out: int) -> World:
    """Shuffle all combinations, assign each a frame, and hold out the first ``held_out`` of them."""
    rng = random.Random(f"world {seed}")
    requests = all_requests()
    rng.shuffle(requests)
    requests = [dataclasses.replace(request, frame=rng.randrange(len(FRAMES))) for request in requests]
    return World(requests[held_out:], requests[:held_out])


def start_rows(requests: Sequence[Request], count: int, seed: int) -> list[Row]:
    """Return ``messages`` rows for the warm start: half of the responses warm, half curt."""
    rng = random.Random(f"start {seed}")
    return [
        {"messages": [*user_turn(request), *assistant_turn(answer(request, manner, rng))]}
        for request, manner in _dealt(requests, count, rng)
    ]


def labeled_rows(requests: Sequence[Request], count: int, seed: int) -> list[Row]:
    """Return ``prompt, completion, label`` rows for KTO: half of them warm and desirable."""
    rng = random.Random(f"labels {seed}")
    return [
        {
            "prompt": user_turn(request),
            "completion": assistant_turn(answer(request, manner, rng)),
            "label": manner == "warm",
        }
        for request, manner in _dealt(requests, count, rng)
    ]


def paired_rows(requests: Sequence[Request], count: int, seed: int) -> list[Row]:
    """Return ``prompt, chosen, rejected`` rows for CPO and the reward model: the warm response is chosen."""
    rng = random.Random(f"pairs {seed}")
    return [
        {
            "prompt": user_turn(request),
            "chosen": assistant_turn(answer(request, "warm", rng)),
            "rejected": assistant_turn(answer(request, "curt", rng)),
        }
        for request, _ in _dealt(requests, count, rng)
    ]


def prompt_rows(requests: Sequence[Request], count: int, seed: int) -> list[Row]:
    """Return ``prompt`` rows for Online DPO, which generates the responses."""
    rng = random.Random(f"prompts {seed}")
    return [{"prompt": user_turn(request)} for request in rng.sample(requests, count)]


def _dealt(requests: Sequence[Request], count: int, rng: random.Random) -> list[tuple[Request, Manner]]:
    """Return ``count`` shuffled requests, every second one with a warm response."""
    drawn = rng.sample(requests, count)
    return [(request, "warm" if number % 2 == 0 else "curt") for number, request in enumerate(drawn)]


def user_turn(request: Request) -> list[dict[str, str]]:
    """Return the request as the messages of a prompt."""
    return [{"role": "user", "content": request.text}]


def assistant_turn(text: str) -> list[dict[str, str]]:
    """Return the response as the messages of a completion."""
    return [{"role": "assistant", "content": text}]


def train_tokenizer(rows: Iterable[Row]) -> Any:
    """Train on the messages of ``rows``, deterministically, so that ``AutoTokenizer`` loads an equal tokenizer.

    The class is Qwen2's, because ``AutoTokenizer`` selects it for any folder with a Qwen2 model: with another class, a
    reloaded tokenizer would split text differently and have one token more than the model.
    """
    texts = (message["content"] for row in rows for message in row["messages"])
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        texts, _VOCABULARY, new_special_tokens=[END, *_ROLES], show_progress=False
    )
    tokenizer.add_special_tokens({"eos_token": END, "additional_special_tokens": list(_ROLES)})
    tokenizer.chat_template = TEMPLATE
    return tokenizer
