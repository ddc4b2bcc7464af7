"""The checks of pages find what they look for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import checks
from tests.docs.result_files import comparison_blocks, newest


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[a](nowhere.md)", "nowhere.md: there is no such file"),
        ("[a](page.md#other)", "page.md#other: there is no such heading"),
        ("[a](#far-away)", "#far-away: there is no such heading"),
        ("[a](#here--there) [b](page.md) [c](https://example.org/x)\n", None),
        ("```\n[a](nowhere.md)\n```", None),
    ],
)
def test_links(tmp_path: Path, text: str, complaint: str | None) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Here & there\n\n{text}")
    assert checks.bad_links(page, page.read_text()) == ([complaint] if complaint else [])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("`cb-backend fly`", "cb-backend fly: there is no such command"),
        ("`cb-backend serve\n--wings 2`", "cb-backend serve: --wings is no option of cb-backend serve"),
        (
            "```\ncb-backend bench engine --wings\n```\n",
            "cb-backend bench: --wings is no option of cb-backend bench engine",
        ),
        (
            "```\ncb-backend timeline demo \\\n  --wings\n```\n",
            "cb-backend timeline: --wings is no option of cb-backend timeline",
        ),
        ("`python -m tests.wings.run --fast`", "python -m tests.wings.run: there is no such module"),
        ("`cb-backend bench engine --model DIR --steps` and `cb-backend --version` and `cb-backend`", None),
        ("```\ncb-backend serve   # not --wings\n```\n", None),
    ],
)  # fmt: skip
def test_commands(text: str, complaint: str | None) -> None:
    assert checks.bad_commands(text) == ([complaint] if complaint else [])


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("see cb_backend/wings.py", ["cb_backend/wings.py"]),
        ("`tests/wings/` and ../kernels/bench.py and tests/peers/run_*.py", ["tests/wings"]),
        ("```diff\n+++ b/cb_backend/wings.py\n```\n cb_backend/wings.py and cb_backend/kernels/NAME.py", []),
        ("`cb_backend/contracts/config.py`, docker/grafana.", []),
    ],
)
def test_paths(text: str, wrong: list[str]) -> None:
    assert checks.bad_paths(text) == [f"{path}: there is no such file" for path in wrong]


def test_hashes() -> None:
    assert checks.commit_hashes("at 6da2c37, (c435933) and f2d4758") == ["6da2c37", "c435933", "f2d4758"]
    assert checks.commit_hashes("1048576 tokens, defaced, 580.159.04") == []


def test_the_newest_of_each_is_kept_in_the_first_ones_order() -> None:
    rows = [{"key": 1, "value": "a"}, {"key": 2, "value": "b"}, {"key": 1, "value": "c"}]
    assert newest(rows, lambda row: row["key"]) == [{"key": 1, "value": "c"}, {"key": 2, "value": "b"}]


def test_a_comparison_is_read_as_it_stands() -> None:
    block = next(block for block in comparison_blocks() if (block.card, block.model) == ("H200", "qwen3-0.6b"))
    assert block.commit == "f2d4758"
    assert block.rows[0] == ["offline a, output tok/s", "20,769", "27,761", "35,366"]
    assert block.rows[3] == ["batch 1 TTFT (128 in), ms", "9.26", "2.68", "0.28"]
