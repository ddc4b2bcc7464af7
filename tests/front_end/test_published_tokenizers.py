"""Every published shape of a tokenizer is as transformers has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.front_end.published_case import Case
from tests.front_end.published_tokenizers import published_tokenizers

CASES = list(published_tokenizers())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_a_published_tokenizer(case: Case, tmp_path: Path) -> None:
    _, build, check = case
    check(build(tmp_path))


def test_the_cases_have_names_of_their_own() -> None:
    names = [name for name, _, _ in CASES]
    assert len(names) == len(set(names)) >= 15
