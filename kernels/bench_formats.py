"""Time whole decode steps of a model in each format of weights and KV cache, beside what the card allows.

    python kernels/bench_formats.py [--model llama-3.1-8b] [--context 1024] [--rows 1,32,128,256]
    python kernels/bench_formats.py --formats w4a16 --rows 1,64,256 --profile    # and what a step's kernels take

A step is embedding, all layers, head and the choice of the most likely token, as one CUDA graph; weights are random.
The floor reads every weight and every key and value once at the copy bandwidth measured in the run; embedding and head
are bfloat16 in every format. Rows go to `results/formats.csv` with card and versions.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import about_card, time_graph, write_csv
from bench_step import profile
from published_models import OTHERS, STORED, write_config
from roofline import MODELS

from cb_backend.kernels.fp8 import FP8
from cb_backend.kv_cache.layout import layout_of
from cb_backend.kv_cache.storage import KVCacheStorage
from cb_backend.layers.ops import resolve_ops
from cb_backend.layers.ropes import Ropes
from cb_backend.layers.step_metadata import StepMetadata
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.registry import load_model, read_model_config
from cb_backend.models.spec import ModelSpec
from cb_backend.study.machine import measure_card, model_shape
from cb_backend.study.roofline import CardLimits, decode_seconds

# name: (quantization, kv_cache_dtype), as in model.json; what the checkpoint's config says of its weights: `STORED`
FORMATS = {
    "bf16": (None, "auto"),
    "fp8 weights": ("fp8", "auto"),
    "fp8 cache": (None, "fp8"),
    "fp8 both": ("fp8", "fp8"),
    "w4a16": (None, "auto"),
    "fp8 blocks": (None, "auto"),
    "nvfp4": (None, "auto"),
    "gguf q4_k": (None, "auto"),
    "gguf q8_0": (None, "auto"),
}
BLOCK_SIZE = 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read_shape(name: str, label: str = "bf16") -> tuple[ModelSpec, Path]:
    """The model's config in a format, and a folder that holds it; weights are dummies."""
    stored = label if label in STORED or label.startswith("gguf ") else "bf16"  # else made narrow as they are loaded
    folder = write_config(Path(tempfile.mkdtemp(prefix="cb_backend-")), name, stored)
    return read_model_config(folder), folder


def decode_metadata(num_rows: int, context: int, ropes: Ropes) -> StepMetadata:
    """Rows of `context` tokens, their own included, in shuffled blocks."""
    per_row = -(-context // BLOCK_SIZE)
    tables = (torch.randperm(num_rows * per_row, device=DEVICE) + 1).int().view(num_rows, per_row)
    positions = torch.full((num_rows,), context - 1, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    nothing = slots[:0]
    return StepMetadata(
        ropes=ropes.rows(positions, positions),
        slot_mapping=(tables[:, -1] * BLOCK_SIZE + (context - 1) % BLOCK_SIZE,),
        block_tables=(tables,),
        num_decode_rows=num_rows,
        decode_slots=slots,
        decode_seq_lens=positions + 1,
        prefill_slots=nothing,
        prefill_query_start_loc=torch.zeros(1, dtype=torch.int32, device=DEVICE),
        prefill_seq_lens=nothing,
        max_query_len=0,
    )


def time_step(
    model: DecoderForCausalLM, storage: KVCacheStorage, num_rows: int, context: int, has_profile: bool
) -> float:
    """Seconds. has_profile: print what its kernels take as well."""
    metadata = decode_metadata(num_rows, context, model.ropes)
    token_ids = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    out = torch.empty(num_rows, dtype=torch.int64, device=DEVICE)

    def step() -> int:
        metadata.decode_plans.clear()
        hidden = model(token_ids, metadata, storage.layers)
        torch.argmax(model.compute_logits(hidden), dim=-1, out=out)
        return 1

    with torch.inference_mode():
        seconds = time_graph(step)
        if has_profile:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            profile(graph)
    return seconds


def measure(
    name: str, formats: list[str], rows: list[int], context: int, card: CardLimits, has_profile: bool = False
) -> Iterator[dict[str, Any]]:
    ops = resolve_ops("triton" if DEVICE.type == "cuda" else "torch")
    num_blocks = max(rows) * -(-context // BLOCK_SIZE) + 1
    for label in formats:
        quantization, kv_cache_dtype = FORMATS[label]
        config, folder = read_shape(name, label)
        model = load_model(
            folder, config, ops=ops, dtype=torch.bfloat16, device=DEVICE, load_format="dummy", quantization=quantization
        )
        kv_dtype = FP8 if kv_cache_dtype == "fp8" else torch.bfloat16
        storage = KVCacheStorage(layout_of(config, BLOCK_SIZE, kv_dtype.itemsize), num_blocks, kv_dtype, DEVICE)
        shape = model_shape(config, "bfloat16", kv_cache_dtype, quantization)
        for num_rows in rows:
            seconds = time_step(model, storage, num_rows, context, has_profile)
            floor = decode_seconds(shape, card, num_rows, num_rows * context)
            yield {
                "model": name, "format": label, "rows": num_rows, "context": context, "ms": round(1e3 * seconds, 3),
                "floor_ms": round(1e3 * floor, 3), "share_of_limit": round(floor / seconds, 3),
                "tokens_s": round(num_rows / seconds),
            }  # fmt: skip
        del model, storage
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b", choices=[*MODELS, *OTHERS])
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rows", default="1,32,128,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--profile", action="store_true", help="print, above each step, what its kernels take")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    card = measure_card("cuda", "bfloat16") if torch.cuda.is_available() else None
    if card is None:
        print("no CUDA device, or none with memory left: steps are timed on a GPU", file=sys.stderr)
        return 2
    torch.cuda.empty_cache()
    about = about_card(card)
    sizes = [int(part) for part in arguments.rows.split(",")]
    found = []
    print(f"{'format':12} {'rows':>5} {'context':>8} {'ms':>8} {'floor':>8} {'share':>7} {'tokens/s':>9}")
    for row in measure(
        arguments.model, arguments.formats.split(","), sizes, arguments.context, card, arguments.profile
    ):
        found.append(row)
        print(
            f"{row['format']:12} {row['rows']:5} {row['context']:8} {row['ms']:8.3f} {row['floor_ms']:8.3f}"
            f" {row['share_of_limit']:7.1%} {row['tokens_s']:9}",
            flush=True,
        )
        write_csv(arguments.out, "formats", found, about)
    print(*(f"{key}={value}" for key, value in about.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
