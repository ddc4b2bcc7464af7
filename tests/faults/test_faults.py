"""A few faults of a real server's steps in every run of the tests; all of them: python -m tests.faults.run

pytest tests/faults/test_faults.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.injections import fail_row, fail_step
from tests.faults.run import judge
from tests.faults.world import make_plan, world
from tests.server.conftest import checkpoint, reference, server_is_installed
from tests.server.tiny_checkpoint import Reference

__all__ = ["checkpoint", "reference", "server_is_installed"]  # fixtures

pytestmark = pytest.mark.server


def test_h4_a_broken_row_and_a_failed_step(checkpoint: Path, tmp_path: Path, reference: Reference) -> None:
    """Both end requests with an error and nothing else; how soon all is well again is not for a test to say."""
    with world(checkpoint, make_plan(reference), tmp_path / "world", 1, ("--deadline", "600")) as made:
        for inject in (fail_row, fail_step):
            inject(made, 0)
            made.wait_for_canary(made.windows[-1].end)
        made.load.stop()
        made.server.wait_idle()
        made.windows = [replace(window, recovery_limit_s=600.0) for window in made.windows]
        result = judge([made.judge()])
    assert result["problems"] == []
    assert (result["lost"], result["wrong"], result["unexpected"]) == (0, 0, 0)
    assert result["errors"] >= 2, "every fault was seen by somebody"
    assert result["good"] > 10
