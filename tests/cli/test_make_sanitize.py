"""`make sanitize` on hosts that lack something, and what it runs where nothing is lacking, told by stand-ins."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cb_backend.cli.paths import checkout_path

# Stands for .venv/bin/python, which is asked for a GPU, and for compute-sanitizer, which notes what it is to run.
FAKE_PYTHON = '#!/bin/bash\n[ "$1" = -c ] && [ -e has-gpu ]\n'
FAKE_SANITIZER = '#!/bin/bash\necho "$*" > ran\nexit $(cat code)\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy with a .venv that `make` holds for up to date, on a host with a GPU and the tool."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(checkout_path(name), tmp_path)
    for name, text in ((".venv/bin/python", FAKE_PYTHON), ("path/compute-sanitizer", FAKE_SANITIZER)):
        program = tmp_path / name
        program.parent.mkdir(parents=True)
        program.write_text(text)
        program.chmod(0o755)
    (tmp_path / ".venv" / ".installed").touch()
    (tmp_path / "has-gpu").touch()
    (tmp_path / "code").write_text("0")
    return tmp_path


def sanitize(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    usual = os.pathsep.join(
        folder for folder in os.environ["PATH"].split(os.pathsep) if not (Path(folder) / "compute-sanitizer").exists()
    )
    environment = {**os.environ, "PATH": f"{checkout / 'path'}:{usual}"}
    environment.pop("MAKEFLAGS", None)  # of a `make` that runs these tests
    command = ["make", "-C", str(checkout), "sanitize", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_soak_runs_under_the_tool(checkout: Path) -> None:
    made = sanitize(checkout, "ARGS=--seconds 60")
    assert made.returncode == 0, made.stderr
    soak = ".venv/bin/python -m tests.engine.soak --device cuda --seconds 20 --seconds 60"
    assert (checkout / "ran").read_text() == f"--tool memcheck --error-exitcode 1 {soak}\n"


def test_what_the_tool_finds_fails_it(checkout: Path) -> None:
    (checkout / "code").write_text("1")
    assert sanitize(checkout).returncode != 0


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ("path/compute-sanitizer", "error: compute-sanitizer is not on the PATH; it comes with the CUDA toolkit"),
        ("has-gpu", "error: no CUDA device is visible to torch; sanitize needs a GPU"),
    ],
)
def test_what_is_lacking_is_named(lacking: str, message: str, checkout: Path) -> None:
    (checkout / lacking).unlink()
    made = sanitize(checkout)
    assert made.returncode != 0
    assert message in made.stderr
    assert not (checkout / "ran").exists()
