"""A few reloads under load in every run of the tests; a hundred: python -m tests.faults.reload

pytest tests/faults/test_reload.py
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.faults.checker import Verdict
from tests.faults.reload import ACTIONS, Reloads, run, table
from tests.faults.run import Setting
from tests.faults.world import make_plan
from tests.server.conftest import checkpoint, reference, server_is_installed
from tests.server.tiny_checkpoint import Reference

__all__ = ["checkpoint", "reference", "server_is_installed"]  # fixtures

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize(
    ("is_polling", "times"), [(False, len(ACTIONS)), (True, 2)], ids=["r60 by hand", "r61 polling"]
)
def test_r60_r61_each_way_to_reload_once(
    checkpoint: Path, tmp_path: Path, reference: Reference, is_polling: bool, times: int
) -> None:
    setting = Setting(checkpoint, make_plan(reference), restart_limit_s=600.0)
    reloads, verdict = run(setting, tmp_path / "world", times, streams=8, front_ends=1, is_polling=is_polling)
    assert verdict.problems == []
    assert len(reloads.took_s) == times
    assert verdict.counts["good"] > 10


def test_r60_what_is_wrong_is_noted() -> None:
    """A metric that falls or goes, a load that should have failed, a server that does not answer."""

    class Server:
        answers = [(200, "")]  # noqa: RUF012

        def post(self, path: str, body: dict[str, object]) -> tuple[int, str]:
            if not self.answers:
                raise ConnectionRefusedError("nobody there")
            return self.answers.pop()

    class FakeWorld:
        server, notes = Server(), []

    reloads = Reloads(FakeWorld(), Path())  # type: ignore[arg-type]
    reloads.ask("load", "llm", is_good=False)
    with pytest.raises(ConnectionRefusedError):
        reloads.ask("load", "llm")
    reloads.compare("here", {"a": 3.0, "b": 1.0})
    reloads.compare("here", {"a": 2.0})
    assert FakeWorld.notes == [
        "load of llm: 200 ",
        "here: b is gone from the metrics",
        "here: a has fallen from 3 to 2",
    ]


def test_r60_the_table_has_a_line_for_each_kind_and_the_sums() -> None:
    one, other = (Reloads(None, Path(), {what: took}) for what, took in (("a", [1.0, 3.0, 2.0]), ("b", [0.5])))  # type: ignore[arg-type]
    verdicts = [Verdict(counts=Counter(requests=number)) for number in (1, 2)]
    lines = table(list(zip((one, other), verdicts, strict=True)))
    assert [line.split() for line in lines[1:3]] == [["a", "3", "2.0", "3.0"], ["b", "1", "0.5", "0.5"]]
    assert lines[3].startswith("requests 3  good 0")
