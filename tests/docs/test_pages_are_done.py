"""The pages that say how to add something, done: their diffs apply to this very tree, and what they add works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.checks import ROOT

COPIED = ("cb_backend", "tests", "kernels", "pyproject.toml")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "faults", "peers", "results")
TESTS_OF_PAGES = {
    "add-a-model": ["tests/models/test_equal_to_transformers.py", "tests/models/test_model_config.py", "-k", "seed"],
    "add-a-kernel": ["tests/kernels/test_relu2_mul.py"],
    "add-a-metric": ["tests/serving/test_failed_requests.py"],
    "add-a-side-result": ["tests/llm/test_entropy.py"],
    "add-a-weight-format": ["tests/models/test_int8_rows.py"],
    "add-a-parameter": [
        *("tests/front_end/test_max_gap.py", "tests/kernels/test_sample.py", "tests/kernels/test_slot_state.py"),
        *("-k", "gap or engine"),
    ],
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what a page changes, in no repository."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=LEFT_OUT)
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


def diff_of(page: str) -> str:
    text = (ROOT / "docs" / "contributing" / f"{page}.md").read_text(encoding="utf-8")
    (diff,) = re.findall(r"^```diff\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return diff


def run(folder: Path, *command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    return subprocess.run(command, cwd=folder, env=environment, input=text, capture_output=True, text=True, timeout=300)


def files_of(diff: str) -> list[str]:
    return re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("page", TESTS_OF_PAGES)
def test_the_change_of_the_page_works(page: str, tree: Path) -> None:
    pytest_command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS_OF_PAGES[page])
    before = run(tree, *pytest_command)
    assert before.returncode in (4, 5), f"the tests of the page are there without it:\n{before.stdout}"
    applied = run(tree, "git", "apply", "-", text=diff_of(page))
    assert applied.returncode == 0, f"the diff of the page does not apply; make it anew:\n{applied.stderr}"
    where = run(tree, sys.executable, "-c", "import cb_backend; print(cb_backend.__file__)")
    assert where.stdout.strip() == str(tree / "cb_backend" / "__init__.py")
    tried = run(tree, *pytest_command)
    assert tried.returncode == 0, tried.stdout + tried.stderr
    assert re.search(r"\b[1-9]\d* passed", tried.stdout)


def test_a_family_is_a_file_and_an_entry_of_the_tests() -> None:
    assert sorted(files_of(diff_of("add-a-model"))) == [
        "cb_backend/models/families/seed_oss.py", "tests/models/tiny_dense_models.py",
    ]  # fmt: skip


def test_a_parameter_of_rows_is_three_files_and_their_tests() -> None:
    assert sorted(files_of(diff_of("add-a-parameter"))) == [
        "cb_backend/contracts/token_rules.py", "cb_backend/front_end/wire/parameters.py",
        "cb_backend/kernels/sample.py", "tests/front_end/test_max_gap.py", "tests/kernels/test_sample.py",
        "tests/kernels/test_slot_state.py",
    ]  # fmt: skip


def test_a_side_result_is_two_files_and_a_test() -> None:
    assert sorted(files_of(diff_of("add-a-side-result"))) == [
        "cb_backend/engine/runner/logprobs.py", "cb_backend/engine/runner/prompt_logprobs.py",
        "tests/llm/test_entropy.py",
    ]  # fmt: skip


def test_a_weight_format_is_two_files_and_a_test() -> None:
    assert sorted(files_of(diff_of("add-a-weight-format"))) == [
        "cb_backend/models/packed_formats.py", "cb_backend/models/quantization.py", "tests/models/test_int8_rows.py",
    ]  # fmt: skip


def test_a_kernel_is_a_file_its_name_and_a_test() -> None:
    assert sorted(files_of(diff_of("add-a-kernel"))) == [
        "cb_backend/kernels/relu2_mul.py", "cb_backend/layers/op_signatures.py", "cb_backend/layers/ops.py",
        "tests/kernels/test_relu2_mul.py",
    ]  # fmt: skip


def test_a_metric_is_a_line_a_field_and_where_it_is_counted() -> None:
    assert sorted(files_of(diff_of("add-a-metric"))) == [
        "cb_backend/contracts/messages.py", "cb_backend/engine/scheduler/results.py",
        "cb_backend/engine/scheduler/stats.py", "cb_backend/serving/metrics.py",
        "tests/serving/test_failed_requests.py",
    ]  # fmt: skip


def test_every_page_that_says_how_to_add_something_is_done() -> None:
    pages = {path.stem for path in (ROOT / "docs" / "contributing").glob("add-a-*.md")}
    assert pages == set(TESTS_OF_PAGES)
