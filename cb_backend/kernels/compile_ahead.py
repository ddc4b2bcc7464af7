"""Compile kernels before they are needed, several processes at once, into Triton's cache on disk.

Triton compiles a variant when it is first launched, one after the other. Here launches are rehearsed: each is noted
and left out, then forked processes compile what was noted. Nothing depends on it: a variant that was not noted, or
whose process failed, is compiled when it is launched. Triton's cache is keyed by source, options, GPU and its own
version, so an upgrade of any of them compiles anew.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cb_backend.kernels.compiled_note import CompiledNote
from cb_backend.kernels.launch import IS_INTERPRETING, triton
from cb_backend.support.collection import no_collection

MAX_PROCESSES = 24
TIMEOUT_SECONDS = 180.0  # then the rest is left to the launches


@dataclass(frozen=True)
class Variant:
    """One kernel with the types and constants of a launch, and the GPU it is for."""

    kernel: Any  # triton.JITFunction
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    target: Any  # triton.backends.compiler.GPUTarget
    launcher: Callable[..., Any] | None = None  # makes the host's part of a launch: a C module that is compiled too
    described: str = ""  # all of it in words, as Triton keys its variants, but for the kernel's source

    def compile(self) -> None:
        source = triton.compiler.ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        compiled = triton.compile(source, target=self.target, options=self.options)
        if self.launcher is not None:
            self.launcher(source, compiled.metadata)


_hashing: threading.Thread | None = None


def begin_hashing() -> None:
    """Hash the whole of Triton, which its cache's keys need and which takes half a second, beside what comes next."""
    global _hashing
    if triton is not None and not IS_INTERPRETING and _hashing is None:
        _hashing = threading.Thread(target=triton.runtime.cache.triton_key, name="hash Triton", daemon=True)
        _hashing.start()


def _triton_key() -> str:
    """Computed once, and waited for where it has been begun."""
    if _hashing is not None:
        _hashing.join()
    key: str = triton.runtime.cache.triton_key()
    return key


def rehearse(launch_all: Callable[[], object]) -> list[Variant]:
    """The variants that `launch_all` would have compiled. No kernel is launched, so results are uninitialised."""
    found: dict[str, Variant] = {}
    launcher = triton.runtime.driver.active.launcher_cls

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # names are Triton's
        kernel, described = fn.jit_function, compile["specialization_data"]
        options = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in json.loads(described)["options"].items()
        }
        target = kernel.device_caches[compile["device"]][2]
        types, constants, (attributes,) = compile["signature"], compile["constants"], compile["configs"]
        variant = Variant(kernel, types, constants, attributes, options, target, launcher, described)
        found.setdefault(described, variant)
        return True  # do not compile

    def run_without_launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **kwargs)

    kernel_class, runtime = triton.JITFunction, triton.knobs.runtime
    run, before = kernel_class.run, runtime.jit_cache_hook
    kernel_class.run, runtime.jit_cache_hook = run_without_launch, note
    try:
        launch_all()
    finally:
        kernel_class.run, runtime.jit_cache_hook = run, before
    return list(found.values())


_variants: list[Variant] = []  # what forked processes inherit


def _compile(index: int) -> str:
    """In a forked process. Returns what went wrong, or nothing."""
    try:
        _variants[index].compile()
    except Exception as error:  # the launch will raise it again, where it can be handled
        return f"{_variants[index].kernel.__name__}: {type(error).__name__}: {error}".splitlines()[0][:200]
    return ""


def compile_variants(variants: list[Variant], num_processes: int | None = None) -> list[str]:
    """Compile all of them; returns one line for each that failed. Forked processes never touch the GPU.

    Raises `TimeoutError` after `TIMEOUT_SECONDS`, `ChildProcessError` where such a process dies: what it was to compile
    may be missing.
    """
    if not variants:
        return []
    _triton_key()  # here, and not in each process
    num_processes = num_processes or max(1, min(len(variants), os.cpu_count() or 1, MAX_PROCESSES))
    _variants[:] = variants
    try:
        with warnings.catch_warnings(), no_collection():
            # Without collections: CUDA ends a forked process that collects an older model's graph.
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of forks beside threads
            errors = _compile_apart(len(variants), num_processes)
    except FutureTimeoutError:
        raise TimeoutError(f"compiling {len(variants)} kernels took longer than {TIMEOUT_SECONDS:.0f} s") from None
    except BrokenProcessPool:
        raise ChildProcessError(f"a process that compiled some of {len(variants)} kernels has died") from None
    finally:
        _variants.clear()
    return [error for error in errors if error]


def _compile_apart(number: int, num_processes: int) -> list[str]:
    """What went wrong with each of so many variants."""
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(num_processes, multiprocessing.get_context("fork"))
    futures = [pool.submit(_compile, 0)]  # starts all processes
    processes = set(multiprocessing.active_children()) - others
    try:
        futures += [pool.submit(_compile, index) for index in range(1, number)]
        wait(futures, TIMEOUT_SECONDS, FIRST_EXCEPTION)
        # Of those that are late, none is cancelled: before Python 3.12 a pool that breaks afterwards trips over them.
        return [future.result(0) for future in futures]
    finally:
        for process in processes:  # one that hangs is not waited for
            process.kill()
        pool.shutdown()


def compile_ahead(launch_all: Callable[[], object], *, is_rehearsal: bool = False) -> int:
    """Compile what `launch_all` would launch; returns the number of variants, 0 where a note says that all of them are
    in the cache. Needs an operating system that forks.

    is_rehearsal: another process compiles the same, and waits in its rehearsal for this one to take part.
    """
    if triton is None or IS_INTERPRETING or not hasattr(os, "fork"):
        return 0
    variants = rehearse(launch_all)
    if is_rehearsal:
        return 0
    note = CompiledNote(Path(triton.knobs.cache.dir), map(_describe, variants))
    if note.is_there():
        return 0
    if not compile_variants(variants):
        note.write()
    return len(variants)


def _describe(variant: Variant) -> str:
    versions = (_triton_key(), variant.kernel.cache_key, str(variant.target), sys.version)
    return "\n".join((variant.described, *versions))
