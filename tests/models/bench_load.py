"""How fast weights come from files to the device, and where a start's time goes. Prints, asserts nothing.

    python -m tests.models.bench_load write FOLDER --shape 8b      # a checkpoint of random weights, written fast
    python -m tests.models.bench_load load FOLDER                  # warm and cold, by threads, beside the library's way
    python -m tests.models.bench_load start FOLDER [--load-format dummy] [--calls 30]

`load` reads the files once before it measures, so `warm` is the page cache; `cold` has dropped them from it, so it is
the disk. `library` is one thread that takes each tensor from the safetensors library and copies it to its place.
`start` times one start of the engine and its first token: take the second one, which finds compiled kernels.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import itertools
import json
import math
import os
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 4096,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "tiny-gpt-oss": {
        "model_type": "gpt_oss", "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 16, "vocab_size": 512,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}  # fmt: skip
EXPONENT = 120  # of all scales of mxfp4: numbers of about 0.02
FILE_BYTES = 5 << 30
BLOCK_ELEMENTS = 32 << 20


def write(folder: Path, shape: str) -> None:
    """Llama's layers, or what the shape's family has; every tensor is a run of the same block of random numbers."""
    import torch

    config = {
        "model_type": "llama", "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
        "tie_word_embeddings": False, "eos_token_id": 2, **SHAPES[shape],
    }  # fmt: skip
    if config["model_type"] == "gpt_oss":
        del config["torch_dtype"]  # as in the published ones, which name no type
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    block = (0.02 * torch.randn(BLOCK_ELEMENTS)).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    files: list[dict[str, tuple[int, ...]]] = [{}]
    room = FILE_BYTES
    for name, size in _tensors(config).items():
        if room < (num_bytes := _num_bytes(name, size)):
            files.append({})
            room = FILE_BYTES
        files[-1][name] = size
        room -= num_bytes
    for number, tensors in enumerate(files):
        _write_file(folder / f"model-{number + 1:05d}-of-{len(files):05d}.safetensors", tensors, block)


def _tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of a checkpoint with this configuration, in the order in which published ones have them."""
    import torch

    from cb_backend.models.config_reader import ConfigReader
    from cb_backend.models.registry import outline_spec, read_spec

    model = outline_spec(read_spec(ConfigReader(config, "config.json")), torch.bfloat16)
    return {name: tuple(shape) for name, shape in sorted((place.name, place.shape) for place in model.placements())}


def _is_in_bytes(name: str) -> bool:
    return name.endswith(("_blocks", "_scales"))


def _num_bytes(name: str, size: tuple[int, ...]) -> int:
    return math.prod(size) * (1 if _is_in_bytes(name) else 2)


def _write_file(path: Path, tensors: dict[str, tuple[int, ...]], block: bytes) -> None:
    entries, end = {}, 0
    for name, size in tensors.items():
        kind, first, end = "U8" if _is_in_bytes(name) else "BF16", end, end + _num_bytes(name, size)
        entries[name] = {"dtype": kind, "shape": size, "data_offsets": [first, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    exponents = bytes([EXPONENT]) * len(block)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, size in tensors.items():
            view, left = memoryview(exponents if name.endswith("_scales") else block), _num_bytes(name, size)
            while left:
                left -= file.write(view[: min(left, len(view))])
        file.flush()
        os.fsync(file.fileno())  # what is not on the disk yet cannot be dropped from the page cache


def measure(folder: Path, threads: list[int], is_cold: bool) -> None:
    files = sorted(folder.glob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in files)
    print(f"{num_bytes / 1e9:.2f} GB in {len(files)} files, {os.cpu_count()} cores", flush=True)
    _visit(files, drop=False)
    load = _loader(folder)
    load(1)  # the context, and the allocator's memory
    rows: list[tuple[str, Callable[[], float]]] = [("library, warm", lambda: load(0))]
    rows += [(f"{number} threads, warm", lambda number=number: load(number)) for number in threads]  # type: ignore[misc]
    for name, run in rows:
        seconds = min(run(), run())
        print(f"{name:>20}: {seconds:6.2f} s {num_bytes / seconds / 1e9:6.2f} GB/s", flush=True)
    for number in threads[-1:] if is_cold else ():
        _visit(files, drop=True)
        seconds = load(number)
        print(f"{number:>12} threads, cold: {seconds:6.2f} s {num_bytes / seconds / 1e9:6.2f} GB/s", flush=True)


def _visit(files: list[Path], drop: bool) -> None:
    """Into the page cache, or out of it."""
    buffer = memoryview(bytearray(64 << 20))
    for path in files:
        file = os.open(path, os.O_RDONLY)
        if drop:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            offset = 0
            while count := os.preadv(file, [buffer], offset):
                offset += count
        os.close(file)


def _loader(folder: Path) -> Callable[[int], float]:
    """Fills a model's tensors, again and again: with a number of threads, or (0) as the library does."""
    import torch
    from safetensors import safe_open

    from cb_backend.engine.runner.runner_factory import resolve_device
    from cb_backend.layers.ops import resolve_ops
    from cb_backend.models import weight_reader
    from cb_backend.models.registry import load_model, read_model_config, resolve_dtype
    from cb_backend.models.weights import fill_from_checkpoint, open_checkpoint

    device, spec = resolve_device("auto"), read_model_config(folder)
    options: dict[str, Any] = {"dtype": resolve_dtype("auto", spec, device), "device": device}
    model = load_model(folder, spec, ops=resolve_ops("torch"), load_format="dummy", **options)
    placements, source = list(model.placements()), open_checkpoint(folder)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def load(num_threads: int) -> float:
        wait()
        start = time.perf_counter()
        if num_threads:
            weight_reader.num_threads = lambda: num_threads
            fill_from_checkpoint(placements, source)
        else:
            for path, group in itertools.groupby(placements, key=lambda each: source.tensors[each.name].path):
                with safe_open(path, framework="pt") as reader:
                    for placement in group:
                        placement.target.copy_(reader.get_tensor(placement.name))
        wait()
        return time.perf_counter() - start

    return load


def start(folder: Path, load_format: str, num_calls: int) -> None:
    """Seconds of each stage, and the calls that took longest."""
    stages, last = {}, time.perf_counter()

    def ends(stage: str) -> None:
        nonlocal last
        now = time.perf_counter()
        stages[stage], last = now - last, now

    gc.disable()  # as the engine's process does at its start
    import torch

    ends("import torch")
    from cb_backend.contracts.config import EngineConfig
    from cb_backend.engine.llm_engine import create_engine
    from cb_backend.engine.runner import runner_factory
    from cb_backend.study.replay import fresh_engine
    from cb_backend.study.timed_pass import run_pass
    from cb_backend.study.workloads import Draw, fixed

    ends("import engine")
    device = runner_factory.resolve_device("auto")
    if device.type == "cuda":
        torch.zeros(1, device=device)
    ends("context")
    profile = cProfile.Profile() if num_calls else None
    config = EngineConfig(model=str(folder), load_format=load_format, max_model_len=8192)
    if profile is not None:
        profile.enable()
    engine = create_engine(config)
    if profile is not None:
        profile.disable()
    ends("engine")
    spec = runner_factory.read_model_config(folder)
    run_pass(fresh_engine(engine), fixed("first-token", 1, 128, 1, Draw(spec.vocab_size)), 0.0)
    ends("first token")
    stages["in all"] = sum(stages.values())
    print("; ".join(f"{stage} {seconds:.2f} s" for stage, seconds in stages.items()), flush=True)
    if profile is not None:
        pstats.Stats(profile).strip_dirs().sort_stats("cumulative").print_stats(num_calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "load", "start"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--cold", action="store_true", help="also from the disk")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto")
    parser.add_argument("--calls", type=int, default=0, help="start: profile it and print so many calls")
    args = parser.parse_args()
    if args.what == "write":
        write(args.folder, args.shape)
    elif args.what == "load":
        measure(args.folder, args.threads, args.cold)
    else:
        start(args.folder, args.load_format, args.calls)


if __name__ == "__main__":
    main()
