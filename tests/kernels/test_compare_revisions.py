"""kernels/compare_revisions.py with revisions that are made up: what it calls different, and what it tells of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cb_backend.cli.paths import checkout_path

ATTENTION, NORM, HEAD = "_decode_attention_kernel", "_rms_norm_kernel", "nvjet_sm90"


def entry(seconds: float, attention_us: float, bits: int = 7, norms: int = 2) -> dict[str, Any]:
    return {
        "model": "llama-3.2-1b", "rows": 1, "bits": [bits], "seconds": seconds,
        "kernels": {ATTENTION: 16, NORM: norms, HEAD: 1},
        "microseconds": {ATTENTION: attention_us, NORM: 30.0, HEAD: 125.0},
    }  # fmt: skip


def compare(
    before: dict[str, Any],
    after: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    models: str = "llama-3.2-1b",
) -> tuple[int, str]:
    monkeypatch.syspath_prepend(str(checkout_path("kernels")))
    import compare_revisions

    def run(folder: Path, model: str, rows: str) -> list[dict[str, Any]]:
        return [(before if folder.name == "before" else after) | {"model": model}]

    monkeypatch.setattr(compare_revisions, "run", run)
    monkeypatch.setattr(sys, "argv", ["compare_revisions.py", "before", "--rounds", "2", "--models", models])
    return compare_revisions.main(), capsys.readouterr().out


def test_tells_which_kernel_made_a_step_longer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = compare(entry(765e-6, 100.0), entry(838e-6, 173.0), monkeypatch, capsys)
    first, second, *_ = told.splitlines()
    assert code == 0
    assert first.split("ratio ")[1].startswith("1.0954 (1.0954 to 1.0954)  19 launches equal  bits equal")
    assert second.split() == ["100.0", "->", "173.0", "us", ATTENTION]


def test_says_no_more_of_steps_that_take_as_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = compare(entry(765e-6, 100.0), entry(769e-6, 103.0), monkeypatch, capsys)
    assert (code, len(told.splitlines())) == (0, 1)


@pytest.mark.parametrize(
    ("changed", "words"), [({"bits": 8}, "bits DIFFER"), ({"norms": 3}, f"20 launches {NORM} 2 -> 3")]
)
def test_another_bit_or_launch_is_a_difference(
    changed: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = compare(entry(765e-6, 100.0), entry(765e-6, 100.0, **changed), monkeypatch, capsys)
    assert code == 1
    assert words in told


def test_models_are_compared_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alike = entry(765e-6, 100.0)
    code, told = compare(alike, alike, monkeypatch, capsys, models="qwen3-0.6b,llama-3.2-1b")
    assert code == 0
    assert [line.split()[0] for line in told.splitlines()] == ["qwen3-0.6b", "llama-3.2-1b"]
