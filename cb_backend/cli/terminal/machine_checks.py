"""Looks at this machine: Python, libraries, driver and GPUs, memory, shared memory, open files. Starts nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from cb_backend.cli.terminal.findings import FAIL, OK, WARN, Finding
from cb_backend.cli.terminal.shown import bytes_text

PACKAGE = "cb_backend"
MIN_CAPABILITY = (8, 0)  # what the kernels are compiled and tuned for
MIN_SHARED_BYTES = 256 << 20  # the server's Python backend passes tensors through it; containers begin with 64 MB
MIN_OPEN_FILES = 4096  # a stream is one
_DRIVER = Path("/proc/driver/nvidia/version")
_QUERY = "name,memory.total,memory.used,driver_version"


def python() -> Iterator[Finding]:
    yield Finding(OK, "python", f"{platform.python_version()}, {PACKAGE} {importlib.metadata.version(PACKAGE)}")


def libraries() -> Iterator[Finding]:
    """Those that the package names, with the versions that it needs."""
    from packaging.requirements import Requirement

    wanted = [Requirement(text) for text in importlib.metadata.requires(PACKAGE) or []]
    wanted = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    wrong, right = [], []
    for requirement in wanted:
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            right.append(f"{requirement.name} {version}")
        else:
            wrong.append(f"{requirement.name} is {version}, needed is {requirement.specifier}")
    for text in wrong:
        yield Finding(
            FAIL, "libraries", text, "pip install -e . in the checkout (or pip install cb_backend's wheel again)"
        )
    yield Finding(OK, "libraries", ", ".join(right))


def torch_and_triton() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding(FAIL, "torch", f"cannot be imported: {error}", "pip install torch, for this driver's CUDA")
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    yield Finding(OK, "torch", f"{torch.__version__} ({build})")
    try:
        yield Finding(OK, "triton", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        yield Finding(WARN, "triton", "is not installed: no kernels, so no GPU", "pip install triton")


def driver() -> Iterator[Finding]:
    """What the driver says by itself, whatever torch makes of it."""
    if not _DRIVER.exists() and shutil.which("nvidia-smi") is None:
        yield Finding(
            WARN, "driver", "no NVIDIA driver: models run on the CPU, for trials with small ones",
            "install the driver; in a container, start it with --gpus all",
        )  # fmt: skip
        return
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding(FAIL, "driver", f"nvidia-smi does not answer ({error})", "restart the driver or the machine")
        return
    if done.returncode != 0:
        reason = (done.stdout + done.stderr).strip().splitlines()
        yield Finding(
            FAIL, "driver", f"nvidia-smi fails: {reason[0] if reason else done.returncode}",
            "driver and kernel module differ after an update: restart the machine",
        )  # fmt: skip
        return
    for line in done.stdout.strip().splitlines():
        name, total, used, version = (part.strip() for part in line.split(","))
        yield Finding(OK, "driver", f"{version}: {name}, {used} of {total} MiB in use")


def gpus() -> Iterator[Finding]:
    """What torch can use of them."""
    import torch

    if not torch.cuda.is_available():
        if _DRIVER.exists():
            remedy = (
                f"a build of torch for this driver (this one is for {torch.version.cuda or 'CPUs'}), or a newer driver"
            )
            yield Finding(FAIL, "gpu", "there is a driver, but torch finds no GPU", remedy)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        free, total = torch.cuda.mem_get_info(index)
        version = ".".join(map(str, capability))
        text = f"{index}: {properties.name} ({version}), {bytes_text(free)} of {bytes_text(total)} free"
        if capability < MIN_CAPABILITY:
            needed = ".".join(map(str, MIN_CAPABILITY))
            yield Finding(WARN, "gpu", text, f"the kernels are tested from compute capability {needed} on")
        elif free < total / 2:
            yield Finding(WARN, "gpu", text, "somebody uses it: nvidia-smi says who; lower gpu_memory_utilization")
        else:
            yield Finding(OK, "gpu", text)
    if not any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")):
        yield Finding(FAIL, "compiler", "no C compiler: triton builds a kernel's launcher with it", "apt install gcc")


def memory() -> Iterator[Finding]:
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free, total = (int(meminfo[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
    text = f"{bytes_text(free)} of {bytes_text(total)} free"
    if free < total / 10:
        yield Finding(WARN, "memory", text, "a checkpoint is read through it; end what takes it")
    else:
        yield Finding(OK, "memory", text)
    shared = shutil.disk_usage("/dev/shm")
    text = f"/dev/shm: {bytes_text(shared.free)} of {bytes_text(shared.total)} free"
    if shared.free < MIN_SHARED_BYTES:
        remedy = "the server passes tensors through it: docker run --shm-size=1g; in Kubernetes an emptyDir of Memory"
        yield Finding(FAIL if shared.free < MIN_SHARED_BYTES // 8 else WARN, "memory", text, remedy)
    else:
        yield Finding(OK, "memory", text)


def open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        remedy = f"each client takes one: ulimit -n {min(65536, hard) if hard > 0 else 65536}"
        yield Finding(WARN, "files", f"{soft} may be open at once", remedy)
    else:
        yield Finding(OK, "files", f"{soft} may be open at once")
