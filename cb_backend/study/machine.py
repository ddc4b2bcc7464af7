"""What a benchmark ran on: card, driver, versions, commit; and what the card can do, measured on the spot."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cb_backend import __version__
from cb_backend.layers.layer_spec import MLPSpec, MoESpec
from cb_backend.layers.weight_format import Fp8Format, PackedFormat
from cb_backend.models.spec import ModelSpec
from cb_backend.study.roofline import CardLimits, ExpertShape, ModelShape
from cb_backend.support.process_watch import process_start_time

REPEATS = 5  # of each measurement; the best one counts, because a limit is what can be reached
FP8_SPEED = 2.0  # of the tensor cores, beside 16-bit products (Hopper's and Ada's data sheets)
COPY_BYTES = (1 << 30, 1 << 28)  # the second where memory is short; both are far above a GPU's L2 cache
CALLS = {"cuda": 10, "cpu": 1}  # in one timing, so that the launch of a kernel does not count
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}


def conditions(device: str) -> dict[str, Any]:
    """Everything beside the model that a figure depends on."""
    import torch

    card, driver = (cpu_name(), "") if device == "cpu" else (torch.cuda.get_device_name(), _driver())
    return {
        "engine": "cb_backend",
        "version": __version__,
        "commit": commit(),
        "card": card,
        "driver": driver,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def cpu_name() -> str:
    return f"{platform.machine()} CPU"


def commit() -> str:
    here = Path(__file__).parent
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "no commit"


def _driver() -> str:
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (found.stdout.split() or ["unknown"])[0]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def config_digest(folder: Path) -> str:
    """Names the model's `config.json` by content, whatever its formatting."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def model_shape(
    config: ModelSpec, dtype: str, kv_cache_dtype: str = "auto", quantization: str | None = None
) -> ModelShape:
    """The sizes that the roofline needs; layers and cache in `dtype` unless they are fp8."""
    is_fp8 = quantization == "fp8"
    size = 4.0 if dtype == "float32" else 2.0
    packed = config.formats.default if config.formats is not None else None
    weight_bytes = packed.bytes_per_weight if isinstance(packed, PackedFormat) else 1.0 if is_fp8 else size
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=_dense_size(config),
        experts=_expert_shape(config, size),
        vocab_size=config.vocab_size,
        weight_bytes=weight_bytes,
        head_bytes=size,
        layer_speed=FP8_SPEED if is_fp8 else 1.0,
        kv_element_bytes=1.0 if kv_cache_dtype == "fp8" else size,
        windows=tuple(config.windows),
    )


def _dense_size(config: ModelSpec) -> int:
    """Intermediate size of the layers without experts; 0: there are none."""
    sizes = [layer.mlp.intermediate_size for layer in config.layers if isinstance(layer.mlp, MLPSpec)]
    return sizes[0] if sizes else 0


def _expert_shape(config: ModelSpec, size: float) -> ExpertShape | None:
    """size: bytes of a parameter in the model's dtype."""
    found = [layer.mlp for layer in config.layers if isinstance(layer.mlp, MoESpec)]
    if not found:
        return None
    return ExpertShape(
        num_layers=len(found),
        num_experts=found[0].num_experts,
        top_k=found[0].top_k,
        intermediate_size=found[0].intermediate_size,
        shared_size=0 if found[0].shared is None else found[0].shared.intermediate_size,
        weight_bytes=None if config.formats is None else _expert_bytes(config, found[0], size),
    )


def _expert_bytes(config: ModelSpec, experts: MoESpec, size: float) -> float:
    """Of an expert's parameter, by the format of the first expert's name."""
    assert config.formats is not None
    index = next(index for index, layer in enumerate(config.layers) if layer.mlp is experts)
    names = experts.names
    found = config.formats(f"{config.layer_name(index)}.{names.module}.{names.experts}.0.{names.gate}")
    if isinstance(found, PackedFormat):
        return found.bytes_per_expert_weight
    return 1.0 if isinstance(found, Fp8Format) else size


def measure_card(device: str, dtype: str) -> CardLimits | None:
    """Bandwidth of a device copy and FLOP/s of a large product of random matrices; None when there is no memory left.

    Random, because products with zeros are faster on some cards.
    """
    import torch

    for num_bytes in COPY_BYTES:
        try:
            bandwidth = _copy_bandwidth(device, num_bytes if device == "cuda" else 1 << 26)
            size = MATMUL_SIZE[device]
            left = torch.randn(size, size, device=device).to(getattr(torch, dtype))
            right = torch.randn(size, size, device=device).to(getattr(torch, dtype))
            product = torch.empty_like(left)
            seconds = _best_seconds(device, lambda: torch.mm(left, right, out=product))  # noqa: B023
            return CardLimits(bandwidth, 2 * size**3 / seconds)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    return None


def _copy_bandwidth(device: str, num_bytes: int) -> float:
    import torch

    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _best_seconds(device, lambda: target.copy_(source))


def _best_seconds(device: str, work: Callable[[], object]) -> float:
    """Seconds of one call: the fastest of a few timings, after a warm-up."""
    import torch

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    work()
    best = float("inf")
    for _ in range(REPEATS):
        synchronize()
        start = time.perf_counter()
        for _ in range(CALLS[device]):
            work()
        synchronize()
        best = min(best, (time.perf_counter() - start) / CALLS[device])
    return best


def reset_peak_memory(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_memory_bytes(device: str) -> int:
    """Device memory allocated at most since the reset (GPU), or the process's largest resident size (CPU)."""
    import torch

    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def seconds_since_process_start() -> float | None:
    """Age of this process; None where the system does not tell (no Linux `/proc`)."""
    started = process_start_time(os.getpid())
    if started is None or not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    return age if 0 <= age < 3600 else None


class StartUp:
    """Seconds of each stage from the start of the process to the first token."""

    def __init__(self) -> None:
        at_entry = seconds_since_process_start()
        self._stages: dict[str, float] = {} if at_entry is None else {"python_and_imports_s": at_entry}
        self._last = time.perf_counter()

    def stage(self, name: str) -> None:
        """The stage `name` ends now."""
        now = time.perf_counter()
        self._stages[name] = now - self._last
        self._last = now

    def finish(self) -> dict[str, float]:
        """Stages in order, and their sum as `total_s`."""
        stages = {**self._stages, "total_s": sum(self._stages.values())}
        return {name: round(seconds, 3) for name, seconds in stages.items()}


def start_up_line(start_up: dict[str, float]) -> str:
    stages = ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} {value} s" for name, value in start_up.items())
    return f"start-up, process start to first token: {stages}"
