"""A diagonal of the equivalence matrix; all of it: python -m tests.engine.equivalence

pytest tests/engine/test_equivalence.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cb_backend.engine.runner.ranks import RankedRunner
from tests.engine.equivalence import OVER_RANKS, PARAMS, SETTINGS, Matrix, empty_cells, make_prompts, run_cell
from tests.engine.equivalence_cells import Cells
from tests.models.tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(write_checkpoint("llama-gqa", tmp_path_factory.mktemp("tiny")), make_prompts()[3::4])


def test_a_diagonal_of_settings_and_parameters(matrix: Matrix) -> None:
    cells = Cells(None, "")
    for setting, name in zip(SETTINGS, PARAMS, strict=True):
        assert run_cell(matrix, cells, setting, name) == []
    assert list(empty_cells(cells)) == []


def test_over_two_ranks(tmp_path: Path) -> None:
    """All of it: python -m tests.engine.equivalence --ranks 2"""
    ranked = Matrix(write_checkpoint("llama-gqa", tmp_path), make_prompts()[1::3], num_ranks=2)
    assert isinstance(ranked.runner, RankedRunner)
    cells = Cells(None, "")
    settings = [setting for setting in SETTINGS if setting.name in OVER_RANKS]
    try:
        for setting, name in zip(settings, ("every filter", "greedy", "logprobs", "repetition"), strict=True):
            assert run_cell(ranked, cells, setting, name) == []
    finally:
        ranked.close()
    assert list(empty_cells(cells)) == []


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    cells = Cells(path, "now")
    cells.note("one", "greedy", [], {"num_preemptions": 2}, has_effect=True)
    cells.note("two", "greedy", ["a difference"], {}, has_effect=False)
    with path.open("a") as file:
        file.write('{"code": "now", "setting": "thr')
    assert Cells(path, "now").wrong == cells.wrong
    cells.note("three", "greedy", [], {}, has_effect=False)
    again = Cells(path, "now")
    assert len(again.wrong) == 3
    assert again.of_setting("one") == {"num_preemptions": 2}
    assert [line.split()[1:3] for line in again.table(["one", "two"], ["greedy", "top_k"]).splitlines()[-2:]] == [
        ["0", "."],
        ["1", "."],
    ]
    assert list(empty_cells(again)) == ["greedy changes no answer"]
    assert not Cells(path, "after a change").wrong


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
