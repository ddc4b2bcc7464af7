"""What `make` installs into .venv, told by a Python that notes its calls: pytest tests/cli/test_make_install.py

torch out of PyPI needs one version of triton and brings it, so no other may be asked for: pip would find no solution.
A CPU build of torch brings none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cb_backend.cli.paths import checkout_path

# Stands for python3 and for .venv/bin/python. `pip show` finds triton where a file says that torch has brought it.
FAKE_PYTHON = """#!/bin/bash
here=$(cd "$(dirname "$0")" && pwd)
case "$*" in
  --version) echo Python 3.11.2 ;;
  "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  "-m pip show"*) [ -e brings-triton ] && [ -e torch-is-there ] ;;
  "-m pip install"*)
    echo "$*" >> calls
    touch torch-is-there
    echo "Collecting torch (from a place)"
    if [ -e fails ]; then
      printf 'The conflict is caused by:\\n    torch 2.13.0 depends on triton==3.7.1\\n'
      exit 1
    fi ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(checkout_path(name), tmp_path)
    python = tmp_path / "path" / "python3"
    python.parent.mkdir()
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return tmp_path


def make(checkout: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{checkout / 'path'}:{os.environ['PATH']}"}
    environment.pop("MAKEFLAGS", None)  # of a `make` that runs these tests
    return subprocess.run(
        ["make", "-C", str(checkout), "PYTHON=", ".venv/.installed"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_triton_that_torch_brings_is_not_overruled(checkout: Path) -> None:
    (checkout / "brings-triton").touch()
    made = make(checkout)
    assert made.returncode == 0, made.stderr
    calls = (checkout / "calls").read_text().splitlines()
    assert [call.split()[-1] for call in calls] == ["torch", ".[local-server,test]"]
    assert not any("triton==" in call for call in calls)
    assert "\ntriton==" not in (checkout / "constraints.txt").read_text()
    assert "  torch\n" in made.stdout


def test_a_torch_without_triton_gets_the_tested_one(checkout: Path) -> None:
    assert make(checkout).returncode == 0
    torch, rest = (checkout / "calls").read_text().splitlines()
    assert "triton" not in torch
    assert " triton==" in rest


def test_what_cannot_be_installed_is_said_with_its_reason(checkout: Path) -> None:
    (checkout / "fails").touch()
    made = make(checkout)
    assert made.returncode != 0
    assert "depends on triton==3.7.1" in made.stdout
    assert not (checkout / ".venv" / ".installed").exists()
