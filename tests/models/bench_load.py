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
import os
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 4096,
    },
}  # fmt: skip
FILE_BYTES = 5 << 30
BLOCK_ELEMENTS = 32 << 20


def write(folder: Path, shape: str) -> None:
    """Llama's layers; every tensor is a run of the same block of random numbers."""
    import torch

    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "tie_word_embeddings": False, "eos_token_id": 2, **SHAPES[shape],
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    block = (0.02 * torch.randn(BLOCK_ELEMENTS)).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    files: list[dict[str, tuple[int, ...]]] = [{}]
    room = FILE_BYTES
    for name, size in _tensors(SHAPES[shape]).items():
        if room < (num_bytes := 2 * _product(size)):
            files.append({})
            room = FILE_BYTES
        files[-1][name] = size
        room -= num_bytes
    for number, tensors in enumerate(files):
        _write_file(folder / f"model-{number + 1:05d}-of-{len(files):05d}.safetensors", tensors, block)


def _tensors(sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocab = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    kv = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    layer = {
        "input_layernorm": (hidden,), "mlp.down_proj": (hidden, inner), "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden), "post_attention_layernorm": (hidden,), "self_attn.k_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "self_attn.q_proj": (hidden, hidden), "self_attn.v_proj": (kv, hidden),
    }  # fmt: skip
    numbers = sorted(range(sizes["num_hidden_layers"]), key=str)
    layers = {f"model.layers.{number}.{name}.weight": size for number in numbers for name, size in layer.items()}
    ends = {"lm_head.weight": (vocab, hidden), "model.embed_tokens.weight": (vocab, hidden)}
    return {**ends, **layers, "model.norm.weight": (hidden,)}


def _product(size: tuple[int, ...]) -> int:
    return size[0] * (size[1] if len(size) > 1 else 1)


def _write_file(path: Path, tensors: dict[str, tuple[int, ...]], block: bytes) -> None:
    entries, end = {}, 0
    for name, size in tensors.items():
        entries[name] = {"dtype": "BF16", "shape": size, "data_offsets": [end, end + 2 * _product(size)]}
        end += 2 * _product(size)
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        view = memoryview(block)
        while end:
            end -= file.write(view[: min(end, len(view))])
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
