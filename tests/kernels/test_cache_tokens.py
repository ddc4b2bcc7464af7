"""What giving blocks back is worth, for the models that have windows."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from cb_backend.cli.paths import checkout_path


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(checkout_path("kernels")))
    import cache_tokens

    return cache_tokens


@pytest.mark.parametrize(
    ("name", "context", "least"),
    [("gemma3-27b", 8192, 3.5), ("gemma3-4b", 8192, 3.5), ("gpt-oss-20b", 4096, 1.8), ("gpt-oss-120b", 4096, 1.8)],
)
def test_tokens_at_equal_memory(script: Any, name: str, context: int, least: float) -> None:
    held = script.held_bytes(script.SHAPES[name], context, 2048, 4)
    assert held.without / held.at_last >= least
    assert held.at_last <= held.at_most


def test_a_context_within_the_window_gains_nothing_and_loses_nothing(script: Any) -> None:
    held = script.held_bytes(script.SHAPES["olmo3-7b"], 4000, 2048, 4)
    assert held.at_last == held.at_most == held.without


def test_prints_a_row_for_each_model_and_context() -> None:
    path = str(checkout_path("kernels") / "cache_tokens.py")
    command = [sys.executable, path, "--model", "gpt-oss-20b", "--context", "4096", "8192"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["gpt-oss-20b", "4,096"], ["gpt-oss-20b", "8,192"]]
