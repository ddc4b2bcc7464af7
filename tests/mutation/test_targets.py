"""The mutation run can begin: what it names exists, and what it leaves out can still be changed."""

from __future__ import annotations

import pytest

from tests.mutation.run import equivalents, mutants_to_try
from tests.mutation.targets import ROOT, TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_has_its_tests_and_no_stale_equivalents(name: str) -> None:
    assert all((ROOT / test).exists() for test in TARGETS[name][1])
    assert mutants_to_try(name)


def test_an_equivalent_change_needs_a_reason_and_a_known_module() -> None:
    assert equivalents("stats | a < b | 1 -> 2 | why\nslots | c | d | e", "stats") == {("a < b", "1 -> 2")}
    with pytest.raises(ValueError, match="must be: module"):
        equivalents("stats | a < b | 1 -> 2 |  ", "stats")
    with pytest.raises(ValueError, match="must be: module"):
        equivalents("unknown | a < b | 1 -> 2 | why", "stats")
