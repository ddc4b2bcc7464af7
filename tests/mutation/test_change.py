"""A change is in effect for all who use the module, and the tests that run with it are those of the target."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.mutation import change
from tests.mutation.change import Changed, Living
from tests.mutation.mutate import mutants
from tests.mutation.run import NOTICED, SURVIVED, try_out
from tests.mutation.targets import TARGETS, source_of

SOURCE = """
LIMIT = 3
DOUBLED = [number + number for number in range(LIMIT)]

def is_below(value, least=0):
    return least <= value < LIMIT and any(value > other for other in [-1])

class Steps:
    def __init__(self, step):
        self.step = step

    @property
    def doubled(self):
        return self.step * 2
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = tmp_path / "module_to_change.py"
    path.write_text(SOURCE)
    monkeypatch.setattr(change, "source_of", lambda name: path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def index_of(what: str) -> int:
    (found,) = (mutant.index for mutant in mutants(SOURCE) if mutant.what == what)
    return found


def test_a_change_inside_a_function_is_there_for_those_who_have_it_already(module: ModuleType) -> None:
    is_below, steps, living = module.is_below, module.Steps(4), Living("module_to_change")
    assert (is_below(1), steps.doubled) == (True, 8)
    assert living.change(index_of("value > other -> value >= other"))
    assert is_below(-1, -1)
    assert living.change(index_of("self.step * 2 -> self.step // 2"))
    assert steps.doubled == 2
    assert not is_below(-1, -1), "one change at a time"


@pytest.mark.parametrize(
    ("what", "doubled", "is_below"),
    [("3 -> 4", [0, 2, 4, 6], True), ("number + number -> number - number", [0, 0, 0], False)],
)
def test_what_a_module_does_when_it_is_imported_is_done_anew(
    module: ModuleType, what: str, doubled: list[int], is_below: bool
) -> None:
    index = index_of(what)
    assert not Living("module_to_change").change(index)
    assert module.DOUBLED == [0, 2, 4]
    loader = Changed("module_to_change", index)
    spec = loader.find_spec("module_to_change")
    assert spec is not None
    made = importlib.util.module_from_spec(spec)
    loader.exec_module(made)
    assert (made.DOUBLED, made.is_below(3)) == (doubled, is_below)


def test_the_tests_of_a_target_notice_a_change_and_survive_one_that_is_none() -> None:
    found = mutants(source_of(TARGETS["layout"][0]).read_text())
    tuning = next(mutant for mutant in found if mutant.what == "8192 -> 8193")
    real = next(mutant for mutant in found if mutant.what.startswith("num_bytes // self.bytes_per_block"))
    outcomes = dict(try_out("layout", [tuning, real], 1, float("inf")))
    assert outcomes == {None: SURVIVED, tuning: SURVIVED, real: NOTICED}
