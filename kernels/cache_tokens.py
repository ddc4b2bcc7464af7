"""How many tokens a KV cache holds where layers with a window give blocks back, beside one that keeps everything.

    python kernels/cache_tokens.py [--gib 80] [--context 4096 8192 32768] [--budget 2048] [--run-ahead 4]

The block manager itself runs: a request is computed to each length, chunk by chunk, and what it holds then is counted,
and what it held at most meanwhile. Sizes are those of the published models; no device is needed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cb_backend.contracts.request import Request
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.kv_cache.block_needs import BlockNeeds
from cb_backend.kv_cache.grouped_manager import GroupedKVCacheManager
from cb_backend.kv_cache.layout import KVLayout, kept_windows, kv_groups, one_group

BLOCK_SIZE = 16
ELEMENT_BYTES = 2


class Shape(NamedTuple):
    windows: tuple[int, ...]  # of each layer, 0: all tokens
    num_kv_heads: int
    head_dim: int


def _pattern(period: int, window: int, num_layers: int) -> tuple[int, ...]:
    """Every `period`-th layer keeps all tokens."""
    return tuple(0 if (layer + 1) % period == 0 else window for layer in range(num_layers))


SHAPES = {
    "gemma3-4b": Shape(_pattern(6, 1024, 34), 4, 256),
    "gemma3-27b": Shape(_pattern(6, 1024, 62), 16, 128),
    "gpt-oss-20b": Shape(_pattern(2, 128, 24), 8, 64),
    "gpt-oss-120b": Shape(_pattern(2, 128, 36), 8, 64),
    "olmo3-7b": Shape(_pattern(4, 4096, 32), 32, 128),
}


class Held(NamedTuple):
    """Bytes that one request holds."""

    at_last: int
    at_most: int
    without: int  # where every layer keeps all of its tokens


def held_bytes(shape: Shape, context: int, budget: int, run_ahead: int) -> Held:
    """Of a request of `context` tokens. Results of chunks come `run_ahead` chunks late."""
    layout = _layout(shape, context)
    needs = BlockNeeds(layout.windows, BLOCK_SIZE, (1 + run_ahead) * budget)
    kv = GroupedKVCacheManager(needs.num_blocks_for(context) + 1, needs)
    tokens = np.arange(context, dtype=np.int32)
    request = Request(1, tokens, context, TokenRules(), (), context + 1)
    assert kv.allocate_slots(request, context) is not None
    ends = [*range(budget, context, budget), context]
    at_most = 0
    for index, end in enumerate(ends):
        kv.take_rows(request, end)
        at_most = max(at_most, len(kv.pool.held_blocks()))
        if index >= run_ahead:
            kv.cache_full_blocks(request, tokens, ends[index - run_ahead])
    kv.cache_full_blocks(request, tokens, context)
    at_last = len(kv.pool.held_blocks())
    kept = KVLayout(groups=one_group(len(shape.windows)), **_sizes(shape))
    without = -(-context // BLOCK_SIZE) * kept.bytes_per_block
    return Held(at_last * layout.bytes_per_block, at_most * layout.bytes_per_block, without)


def _layout(shape: Shape, context: int) -> KVLayout:
    return KVLayout(groups=kv_groups(kept_windows(shape.windows, context + 1)), **_sizes(shape))


def _sizes(shape: Shape) -> dict[str, int]:
    return {
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "block_size": BLOCK_SIZE,
        "element_bytes": ELEMENT_BYTES,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--context", type=int, nargs="+", default=[4096, 8192, 32768])
    parser.add_argument("--gib", type=float, default=80.0, help="memory of the cache")
    parser.add_argument("--budget", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--run-ahead", type=int, default=4)
    options = parser.parse_args()
    memory = options.gib * (1 << 30)
    print(f"{'model':<13} {'context':>8} {'groups':>6} {'all kept':>12} {'windows only':>13} {'ratio':>6} {'peak':>6}")
    for name in options.model:
        for context in options.context:
            held = held_bytes(SHAPES[name], context, options.budget, options.run_ahead)
            num_groups = len(_layout(SHAPES[name], context).groups)
            before, after = (int(memory / size) * context for size in (held.without, held.at_last))
            print(
                f"{name:<13} {context:>8,} {num_groups:>6} {before:>12,} {after:>13,}"
                f" {held.without / held.at_last:>6.2f} {held.at_most / held.at_last:>6.2f}"
            )
    print(
        f"Tokens of requests of that length in {options.gib:g} GiB; ratio of what one holds; the most it holds while"
        " its prompt is computed, in what it holds afterwards"
    )


if __name__ == "__main__":
    main()
