"""Compiling in forked processes: what was noted lies in Triton's cache, what fails is told and harms nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]

# In a process of its own: compiling needs Triton without the interpreter.
SCRIPT = """
import json
from triton.backends.compiler import GPUTarget
from cb_backend.kernels import compile_ahead
from tests.kernels.compiling import record

def variant(op, kernel, call, **options):
    recorder = record(op, kernel, call, 90)
    source, given = recorder.source({})
    return compile_ahead.Variant(
        recorder.kernel, source.signature, source.constants, source.attrs, given | options, GPUTarget("cuda", 90, 32)
    )

variants = [
    variant("rms_norm", "_rms_norm_kernel", {"hidden_size": 64}),
    variant("silu_mul", "_silu_mul_kernel", {"intermediate_size": 64}),
    variant("silu_mul", "_silu_mul_kernel", {"intermediate_size": 64}, num_warps=3),
]
print(json.dumps(compile_ahead.compile_variants(variants, 2)))
"""


def test_variants_are_compiled_into_the_cache(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=1200,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    (error,) = json.loads(result.stdout)
    assert error.startswith("_silu_mul_kernel: AssertionError: num_warps must be a power of 2")
    compiled = {path.stem for path in tmp_path.rglob("*.cubin")}
    assert compiled == {"_rms_norm_kernel", "_silu_mul_kernel"}


def test_nothing_is_compiled_ahead_for_the_interpreter() -> None:
    from cb_backend.kernels.compile_ahead import compile_ahead

    assert compile_ahead(lambda: pytest.fail("launched")) == 0
