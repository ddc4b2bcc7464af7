"""Under which card and commit a figure of `kernels/results` is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import result_files
from tests.docs.result_files import RESULTS, expert_blocks

STEP = "gpt-oss-{size}   rows    {rows} context 1024 equal    2.783 ms, floor 1.227, 44.1%, 4.0 experts hit"
VERSIONS = "driver 580.1, torch 2.11.0+cu130, triton 3.6.0"


@pytest.mark.parametrize("header", [
    "card: NVIDIA B200, {versions}; code of commit bbbbbbb",
    "B200, 8 cores of 16, {versions}; code of bbbbbbb.",
    "One NVIDIA B200 (16 cores), {versions}, nothing else on the card; code of bbbbbbb. vLLM before it.",
    "One B200 of two of a host (10 cores of 32, tests on the other GPU), {versions}; code of bbbbbbb.",
])  # fmt: skip
def test_steps_are_of_the_header_above_them(header: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        f"card: NVIDIA H200, {VERSIONS}; code of commit aaaaaaa", STEP.format(size="20b", rows=1),
        "python kernels/tune_grouped.py --dry-run   (mxfp4; code of commit ccccccc)", STEP.format(size="20b", rows=8),
        "", header.format(versions=VERSIONS), "", STEP.format(size="20b", rows=1), STEP.format(size="120b", rows=1),
    ]  # fmt: skip
    (tmp_path / "experts.txt").write_text("\n".join(lines))
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    first, *others = expert_blocks()
    assert (first.card, first.commit, [row[0] for row in first.rows]) == ("H200", "aaaaaaa", ["1", "8"])
    assert [(each.card, each.commit, len(each.rows)) for each in others] == [("B200", "bbbbbbb", 1)] * 2
    assert all(VERSIONS in each.about and "code of" not in each.about for each in (first, *others))


def test_no_header_of_the_file_is_passed_over() -> None:
    """Every line that names the code, but for a command's, tells of what stands below it."""
    lines = (RESULTS / "experts.txt").read_text().splitlines()
    told = [line for line in lines if "; code of" in line and not line.startswith("python")]
    assert len(told) > 3
    assert all(result_files.header_of(line) is not None for line in told)


def test_steps_of_the_120b_are_of_their_own_commit() -> None:
    commits = {block.commit for block in expert_blocks() if block.model.startswith("gpt-oss-120b")}
    assert "a8bde29" in commits
    assert "059fe65" not in commits  # that of the file's first header
