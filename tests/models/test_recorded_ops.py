"""Models ask the same of their ops as when it was recorded: whoever does not use an option pays nothing for it.

Equal launches of equal shapes; that the results are right is tested elsewhere.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from cb_backend.layers.op_signatures import ModelOps, StepOps
from cb_backend.layers.ops import resolve_ops
from tests.models.recorded_ops import CASES, RECORDS, record


@pytest.mark.parametrize("case", CASES)
def test_x1_a_step_is_made_of_the_recorded_calls(case: str, tmp_path: Path) -> None:
    assert record(case, tmp_path) == json.loads(RECORDS.read_text())[case]


def test_x1_every_recorded_case_is_checked_and_asks_for_something() -> None:
    records = json.loads(RECORDS.read_text())
    assert records.keys() == CASES.keys()
    assert all(len(calls) > 30 for calls in records.values())


def parameters(function: object) -> list[tuple[str, object]]:
    """Names and defaults, in order."""
    given = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [(parameter.name, parameter.default) for parameter in given if parameter.name != "self"]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("protocol", [ModelOps, StepOps])
def test_ops_are_called_as_their_protocols_say(protocol: type, backend: str) -> None:
    ops = resolve_ops(backend)
    names = [name for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"]
    assert len(names) >= 9
    for name in names:
        assert parameters(getattr(ops, name)) == parameters(getattr(protocol, name)), name
