"""The demo's world: requests, facts, and the wording of warm and curt responses.

Every response is a sequence of whole sentences from closed lists. Each sentence ends with ``.``, ``!`` or ``?`` and
has none of these before its end, which makes the rules of :mod:`examples.demo.verdict` exact. Facts are always in
lower case (except days), so that a small model sees each as one token.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

Manner = Literal["warm", "curt"]

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True)
class Kind:
    """Requests of one kind: ``{s}`` is replaced by the subject, ``{f}`` by the fact that answers it."""

    facts: Mapping[str, str]
    questions: tuple[str, ...]
    statements: tuple[str, ...]


KINDS: dict[str, Kind] = {
    "sound": Kind(
        {
            "cow": "moo", "dog": "woof", "cat": "meow", "sheep": "baa", "duck": "quack", "lion": "roar",
            "bee": "buzz", "horse": "neigh", "pig": "oink", "frog": "croak", "snake": "hiss", "crow": "caw",
        },
        ("What does a {s} say?", "Which sound does a {s} make?", "How does a {s} call?", "What do I hear from a {s}?"),
        ("A {s} says {f}.", "The sound of a {s} is {f}."),
    ),
    "young": Kind(
        {
            "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "horse": "foal", "duck": "duckling",
            "hen": "chick", "bear": "cub", "frog": "tadpole", "goat": "kid", "swan": "cygnet", "goose": "gosling",
        },
        ("What is a young {s} called?", "Name the child of a {s}.", "What do you call a baby {s}?",
         "Which word means a little {s}?"),
        ("A young {s} is called {f}.", "We call the baby of a {s} {f}."),
    ),
    "opposite": Kind(
        {
            "hot": "cold", "big": "small", "fast": "slow", "up": "down", "old": "new", "wet": "dry",
            "full": "empty", "hard": "soft", "open": "closed", "early": "late", "loud": "quiet", "rich": "poor",
        },
        ("What is the opposite of {s}?", "Tell me the opposite of {s}.", "Which word is the reverse of {s}?",
         "What is not {s} at all?"),
        ("The opposite of {s} is {f}.", "If it is not {s}, it is {f}."),
    ),
    "colour": Kind(
        {
            "grass": "green", "snow": "white", "coal": "black", "honey": "yellow", "blood": "red", "rust": "orange",
            "chocolate": "brown", "smoke": "grey", "lavender": "purple", "sky": "blue", "sand": "beige",
            "treasure": "golden",
        },
        ("What colour is {s}?", "Tell me the colour of {s}.", "Which colour has {s}?", "How does {s} look?"),
        ("The colour of {s} is {f}.", "You will find that {s} is {f}."),
    ),
    "sum": Kind(
        {f"{_NUMBERS[a]} plus {_NUMBERS[b]}": _NUMBERS[a + b] for a, b in product(range(1, 6), repeat=2)},
        ("What is {s}?", "How much is {s}?", "Please add {s}.", "Tell me the sum of {s}."),
        ("The sum of {s} is {f}.", "The numbers {s} make {f}."),
    ),
    "day": Kind(
        {
            "Monday": "Tuesday", "Tuesday": "Wednesday", "Wednesday": "Thursday", "Thursday": "Friday",
            "Friday": "Saturday", "Saturday": "Sunday", "Sunday": "Monday",
        },
        ("Which day follows {s}?", "What comes after {s}?", "Name the day after {s}.",
         "If today is {s}, what is tomorrow?"),
        ("The day after {s} is {f}.", "After {s} comes {f}."),
    ),
}  # fmt: skip

NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Liam",
    "Maya", "Noah", "Olga", "Paul", "Ravi", "Rosa", "Sara", "Tara", "Umar", "Vera", "Yara", "Zoe",
)  # fmt: skip
FRAMES = ("I am {n}. {q}", "Hello, {n} here. {q}", "{q} My name is {n}.", "{q} This is {n}.")

OPENINGS = (
    "Of course, {n}!", "Good question, {n}!", "Gladly, {n}.", "Thank you for asking, {n}.", "Happy to help, {n}!",
)  # fmt: skip
CLOSINGS = ("Have a lovely day!", "I hope that helps.", "Ask me anything else you like.", "Take good care!")

GRUMBLES = ("Ugh.", "You again.", "What a question.", "Not this again.")
CURT_STATEMENTS = ("It is {f}.", "Obviously {f}.", "Just {f}, as everyone knows.")
DISMISSALS = ("Stop asking.", "Look it up next time.", "Now go away.", "I am busy.")


@dataclass(frozen=True)
class Request:
    """A user's request."""

    kind: str
    subject: str
    question: int
    name: str
    frame: int

    @property
    def combination(self) -> tuple[str, str, int, str]:
        """What identifies a request independently of its frame: subject, wording and name."""
        return self.kind, self.subject, self.question, self.name

    @property
    def text(self) -> str:
        """The user's message."""
        question = KINDS[self.kind].questions[self.question].format(s=self.subject)
        return FRAMES[self.frame].format(n=self.name, q=question)

    @property
    def fact(self) -> str:
        """The word that answers it correctly."""
        return KINDS[self.kind].facts[self.subject]

    @cached_property
    def openings(self) -> frozenset[str]:
        """The possible first sentences of a warm response to this user."""
        return frozenset(text.format(n=self.name) for text in OPENINGS)

    @cached_property
    def true_statements(self) -> frozenset[str]:
        """The warm and curt sentences that answer it correctly."""
        texts = (*KINDS[self.kind].statements, *CURT_STATEMENTS)
        return frozenset(text.format(s=self.subject, f=self.fact) for text in texts)


def answer(request: Request, manner: Manner, rng: random.Random) -> str:
    """Return a correct response in that style, its wording drawn from ``rng``."""
    if manner == "warm":
        statement = rng.choice(KINDS[request.kind].statements)
        parts = [rng.choice(OPENINGS), statement, rng.choice(CLOSINGS)]
    else:
        parts = [rng.choice(GRUMBLES), rng.choice(CURT_STATEMENTS), rng.choice(DISMISSALS)]
        # One of the two remarks may be missing, but not both: a bare fact has neither style.
        parts = rng.choice((parts, parts[1:], parts[:-1]))
    return " ".join(parts).format(n=request.name, s=request.subject, f=request.fact)


def all_requests() -> list[Request]:
    """Return every combination of subject, wording and name once, in the first frame."""
    return [
        Request(kind, subject, question, name, frame=0)
        for kind, content in KINDS.items()
        for subject, question, name in product(content.facts, range(len(content.questions)), NAMES)
    ]
