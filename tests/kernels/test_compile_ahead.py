"""Compiling in forked processes: what was noted lies in Triton's cache, what fails is told and harms nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cb_backend.kernels import compile_ahead
from cb_backend.kernels.compiled_note import CompiledNote

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


# What only the process that made it may end, as CUDA's graphs are; in cycles, so it lies there until it is collected.
GARBAGE = """
import os

class OfOneProcess:
    def __init__(self):
        self.itself, self.owner = self, os.getpid()

    def __del__(self):
        if os.getpid() != self.owner:
            os.abort()
        OfOneProcess()  # so that there is one whenever a process is forked

OfOneProcess()
"""
ONE_DIES = "compile_ahead.Variant.compile = lambda variant: os._exit(3)"
ALL_HANG = """
variants *= 5  # more than the processes take at once
compile_ahead.TIMEOUT_SECONDS = 1.0
compile_ahead.Variant.compile = lambda variant: time.sleep(3600)
"""


def _run(script: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache)}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=1200,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("before", ["", GARBAGE], ids=["", "beside garbage of this process"])
def test_variants_are_compiled_into_the_cache(before: str, tmp_path: Path) -> None:
    result = _run(SCRIPT.replace("print(", before + "print("), tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    (error,) = json.loads(result.stdout)
    assert error.startswith("_silu_mul_kernel: AssertionError: num_warps must be a power of 2")
    compiled = {path.stem for path in tmp_path.rglob("*.cubin")}
    assert compiled == {"_rms_norm_kernel", "_silu_mul_kernel"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (ONE_DIES, "ChildProcessError: a process that compiled some of 3 kernels has died"),
        (ALL_HANG, "TimeoutError: compiling 15 kernels took longer than 1 s"),
    ],
    ids=["dies", "hangs"],
)
def test_a_process_that_does_not_end_as_it_should_is_told(change: str, told: str, tmp_path: Path) -> None:
    result = _run("import os, time\n" + SCRIPT.replace("print(", change + "\nprint("), tmp_path)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == told
    assert result.stderr.count("Traceback") - result.stderr.count("During handling") == 1, result.stderr


def test_a_note_is_of_one_set_of_variants_in_any_order(tmp_path: Path) -> None:
    note = CompiledNote(tmp_path, ["rms_norm, 64", "silu_mul, 64"])
    assert not note.is_there()
    note.write()
    assert CompiledNote(tmp_path, ["silu_mul, 64", "rms_norm, 64"]).is_there()
    assert not CompiledNote(tmp_path, ["rms_norm, 64"]).is_there()
    assert not CompiledNote(tmp_path, ["rms_norm, 64", "silu_mul, 128"]).is_there()
    shutil.rmtree(tmp_path)
    assert not note.is_there()
    note.write()  # there is nowhere to put it: no harm


@pytest.mark.parametrize("errors", [[], ["_silu_mul_kernel: AssertionError"]])
def test_what_is_noted_is_not_compiled_again(
    errors: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def compile_variants(variants: list[Any]) -> list[str]:
        compiled.extend(variant.described for variant in variants)
        return errors

    def variant(described: str) -> compile_ahead.Variant:
        return compile_ahead.Variant(SimpleNamespace(cache_key="source"), {}, {}, {}, {}, "sm_90", None, described)

    wanted = [variant("rms_norm, 64"), variant("silu_mul, 64")]
    monkeypatch.setattr(compile_ahead, "IS_INTERPRETING", False)
    monkeypatch.setattr(compile_ahead, "rehearse", lambda launch_all: wanted)
    monkeypatch.setattr(compile_ahead, "compile_variants", compile_variants)
    monkeypatch.setattr(compile_ahead.triton.knobs.cache, "dir", str(tmp_path))
    assert compile_ahead.compile_ahead(lambda: None) == 2
    assert compile_ahead.compile_ahead(lambda: None) == (2 if errors else 0)
    monkeypatch.setattr(wanted[0].kernel, "cache_key", "another source")
    assert compile_ahead.compile_ahead(lambda: None) == 2
    assert len(compiled) == (6 if errors else 4)


def test_nothing_is_compiled_ahead_for_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which these tests are run with only where there is no GPU."""
    monkeypatch.setattr(compile_ahead, "IS_INTERPRETING", True)
    assert compile_ahead.compile_ahead(lambda: pytest.fail("launched")) == 0


HASHED = """
import json, threading
from cb_backend.kernels import compile_ahead
from cb_backend.kernels.launch import triton

cache, names = triton.runtime.cache, []
hashed = cache.triton_key

def slowly():
    names.append(threading.current_thread().name)
    return hashed()

import functools
cache.triton_key = functools.lru_cache(slowly)
compile_ahead.begin_hashing()
compile_ahead.begin_hashing()
print(json.dumps([names, compile_ahead._triton_key() == hashed(), compile_ahead._hashing.is_alive()]))
"""


def test_the_compiler_is_hashed_once_and_beside_others(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HASHED], capture_output=True, text=True, check=True, cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1]) == [["hash Triton"], True, False]
