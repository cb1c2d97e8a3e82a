"""The configurations by which memory plans are judged follow from their seeds, and cover what they claim to."""

from __future__ import annotations

import dataclasses
import itertools
import json

from support.memory_cases import CORE, COUNT, FACTORS, FILE, HELD_OUT, cases


def test_each_configuration_is_the_one_of_its_seed() -> None:
    listed = [json.loads(line) for line in FILE.read_text().splitlines()]
    assert [dataclasses.asdict(case) for case in cases()] == listed
    assert len({case.seed for case in cases()}) == COUNT


def test_the_configurations_cover_every_value_and_the_pairs_that_matter() -> None:
    """Architectures differ in activations, not in how they are trained, so that not each needs every method."""
    found = [dataclasses.asdict(case) for case in cases()]
    for name, values in FACTORS.items():
        assert {case[name] for case in found} == set(values), name
    for one, other in itertools.combinations(CORE, 2):
        together = set(itertools.product(FACTORS[one], FACTORS[other])) - {("4-bit", 3)}
        missing = together - {(case[one], case[other]) for case in found}
        assert len(missing) <= len(together) // 8, (one, other, missing)
    assert sum(case["architecture"] in HELD_OUT for case in found) == COUNT // 4
