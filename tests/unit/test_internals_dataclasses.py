"""Assumptions of `alignment.internals.dataclass_fields`."""

from __future__ import annotations

import dataclasses

from alignment.internals.dataclass_fields import hide_field


@dataclasses.dataclass
class Base:
    shown: int = 1
    hidden: int = 2

    def __post_init__(self, hidden: int = 2) -> None:
        self.hidden = hidden


hide_field(Base.__dataclass_fields__["hidden"])


@dataclasses.dataclass
class Derived(Base):
    further: int = 3


def test_a_hidden_field_is_kept_by_replace_in_subclasses_too() -> None:
    assert [field.name for field in dataclasses.fields(Derived)] == ["shown", "further"]
    assert (Derived(hidden=5).hidden, dataclasses.replace(Derived(hidden=5), shown=0).hidden) == (5, 5)
