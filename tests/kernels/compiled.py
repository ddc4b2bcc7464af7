"""Cases of `compiling.py`, compiled in a process of its own, as the tests' has the interpreter; several at once.

As a program it reads the cases as JSON on standard input and prints one JSON line each.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def compile_all(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the compiler reports of every case (`compiling.compile_case`), by name."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled"],
        input=json.dumps([*cases.values()]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=2 * 3600,  # minutes on two cores; a machine may be ten times slower
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    return dict(zip(cases, reports, strict=True))


def main() -> None:
    from tests.kernels.compiling import compile_case  # brings Triton

    with multiprocessing.get_context("fork").Pool(min(os.cpu_count() or 1, 8)) as pool:
        for report in pool.imap(compile_case, json.load(sys.stdin)):
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
