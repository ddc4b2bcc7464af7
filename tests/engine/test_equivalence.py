"""A diagonal of the equivalence matrix; all of it: python -m tests.engine.equivalence

pytest tests/engine/test_equivalence.py
"""

from __future__ import annotations

import pytest

from tests.engine.equivalence import PARAMS, SETTINGS, Matrix, empty_cells, make_prompts
from tests.models.tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(write_checkpoint("llama-gqa", tmp_path_factory.mktemp("tiny")), make_prompts()[3::4])


def test_a_diagonal_of_settings_and_parameters(matrix: Matrix) -> None:
    done: dict[str, dict[str, int]] = {}
    for setting, name in zip(SETTINGS, PARAMS, strict=True):
        assert matrix.differences(setting, name, done.setdefault(setting.name, {})) == []
    assert list(empty_cells(matrix, done)) == []


def test_a_wrong_token_is_found(matrix: Matrix) -> None:
    expected = matrix.alone("greedy")
    last = len(matrix.prompts) - 1
    token_ids = expected.token_ids[last]
    token_ids[-1] += 1
    try:
        (problem,) = matrix.differences(SETTINGS[0], "greedy", {})
    finally:
        token_ids[-1] -= 1
    assert f"prompt {last}" in problem
