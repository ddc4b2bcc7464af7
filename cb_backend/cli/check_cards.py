"""Cards by name, and how much of one is left for the KV cache: what an engine would find there, reckoned beforehand."""

from __future__ import annotations

import argparse
import re
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

import torch

from cb_backend.contracts.adapters import DEFAULT_MAX_LORAS
from cb_backend.contracts.config import MAX_COUNT, EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.engine.runner.cuda_warm_up import GRAPH_MEMORY
from cb_backend.engine.runner.load_progress import lack_of_memory
from cb_backend.engine.runner.runner_factory import fp8_faults
from cb_backend.kernels.fp8 import MIN_CAPABILITY, fp8_needs_of
from cb_backend.kv_cache.block_needs import BlockNeeds
from cb_backend.kv_cache.layout import ALL_TOKENS, KVLayout, engine_layout, layout_of
from cb_backend.kv_cache.make_manager import needs_of
from cb_backend.kv_cache.storage import kv_not_capable, resolve_kv_dtype, show_bytes, size_kv_cache
from cb_backend.models.spec import ModelSpec
from cb_backend.study.gpu_plan import Rates
from cb_backend.study.roofline import CardLimits

_GIB = 1 << 30
# Of a context, the libraries' kernels and work space, before the first weight.
_CONTEXT_BYTES = int(0.8 * _GIB)
_UNITS = {"": 1, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 1 << 20, "GIB": _GIB, "TIB": 1 << 40}


# What is reached of the data sheets' figures below.
COPY_SHARE, PRODUCT_SHARE, LINK_SHARE = 0.9, 0.8, 0.8
PCIE_GB = 32.0  # of a PCIe 4 card: those cannot read one another's memory
PEER_SUM_SECONDS, LIBRARY_SUM_SECONDS = 4e-6, 25e-6  # of a few rows, over shared memory and with NCCL through the host
UNKNOWN_RATES = Rates(CardLimits(1.0, 1.0), 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU that need not be here."""

    name: str
    num_bytes: int  # as CUDA reports them, which is less than what is sold
    capability: tuple[int, int]
    rates: Rates = UNKNOWN_RATES


def _card(
    name: str, gibibytes: float, capability: tuple[int, int], bandwidth: float, tflops: float, link: float
) -> Card:
    """bandwidth: TB/s; tflops: of dense bfloat16; link: GB/s in one direction, of NVLink or else of PCIe."""
    limits = CardLimits(COPY_SHARE * bandwidth * 1e12, PRODUCT_SHARE * tflops * 1e12)
    has_peers = link > PCIE_GB
    rates = Rates(limits, LINK_SHARE * link * 1e9, PEER_SUM_SECONDS if has_peers else LIBRARY_SUM_SECONDS)
    return Card(name, int(gibibytes * _GIB), capability, rates)


CARDS = {
    card.name: card
    for card in (
        _card("b200", 178.3, (10, 0), 8.0, 2250, 900),
        _card("h200", 139.8, (9, 0), 4.8, 989, 450),
        _card("h100", 79.1, (9, 0), 3.35, 989, 450),
        _card("a100", 79.1, (8, 0), 2.04, 312, 300),
        _card("a100-40gb", 39.4, (8, 0), 1.555, 312, 300),
        _card("l40s", 44.4, (8, 9), 0.864, 362, PCIE_GB),
        _card("l4", 22.0, (8, 9), 0.3, 121, PCIE_GB),
        _card("a10", 22.0, (8, 6), 0.6, 125, PCIE_GB),
        _card("rtx4090", 23.5, (8, 9), 1.008, 165, PCIE_GB),
    )
}


def memory_size(text: str) -> int:
    """`141GB`, `80GiB`: bytes, for argparse."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", text.upper())
    unit = match[2] if match else ""
    unit = unit if unit in _UNITS or unit.endswith("B") else f"{unit}B"
    if match is None or unit not in _UNITS or not 0 < float(match[1]) * _UNITS[unit] <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size of memory, like 80GB or 79.1GiB")
    return int(float(match[1]) * _UNITS[unit])


def card_faults(card: Card, config: EngineConfig, quantization: str | None, dtype: torch.dtype) -> list[str]:
    """What the card's kernels cannot do of what is asked for, in the engine's words."""
    faults = list(fp8_faults(quantization, dtype, card.name, card.capability))
    if config.kv_cache_dtype != "auto" and card.capability < MIN_CAPABILITY:
        faults.append(kv_not_capable(config.kv_cache_dtype, fp8_needs_of(card.name, card.capability)))
    return faults


def cache_layout(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, max_model_len: int | None) -> KVLayout:
    """Of the cache that an engine would make. max_model_len: None where it could not be found out."""
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype, torch.device("cpu"))
    if max_model_len is None:
        return layout_of(spec, config.block_size, kv_dtype.itemsize)
    return engine_layout(config, spec, kv_dtype.itemsize, max_model_len)


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """What a cache has room for, in tokens."""

    num_tokens: int  # of as many requests as it holds while these decode
    longest_request: int  # prompt and answer of one, whose prompt is computed in as many steps at once as are launched


def cache_room(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    layout: KVLayout,
    card: Card,
    weight_bytes: int,
    adapter_bytes: int = 0,
    length: int = 0,
) -> CacheRoom:
    """What the cache would hold, and the longest request that the engine would take.

    In requests of `length` tokens, or the longest ones, where layers with a window give back what they no longer see:
    there the longer a request, the less of it is kept. Raises `ConfigError` as the engine does where the weights do not
    fit, or the places for adapters, or no cache beside them.
    """
    free_bytes = card.num_bytes - _CONTEXT_BYTES
    if lack := lack_of_memory(config.model, weight_bytes, "cuda", free_bytes, card.num_bytes):
        raise ConfigError(lack)
    free_bytes -= weight_bytes
    steps = _step_bytes(config, spec, dtype)
    spare = _without_cache(config, layout, card, free_bytes)
    _refuse_large_adapters(config, adapter_bytes, free_bytes, spare - steps)
    _refuse_large_steps(config, spec, dtype, spare - adapter_bytes)
    free_bytes -= adapter_bytes
    num_blocks = size_kv_cache(config, layout, torch.device("cuda"), steps, (free_bytes, card.num_bytes))
    num_blocks -= 1  # block 0 is the null block
    run_ahead = config.steps_ahead("cuda")
    longest = needs_of(config, layout.windows, run_ahead).most_tokens(num_blocks)
    if layout.windows == (ALL_TOKENS,):
        return CacheRoom(num_blocks * config.block_size, longest)
    length = min(length, longest)
    decoding = BlockNeeds(layout.windows, config.block_size, most_in_flight=1 + run_ahead)
    return CacheRoom(num_blocks * length // decoding.num_blocks_for(length), longest)


def _without_cache(config: EngineConfig, layout: KVLayout, card: Card, free_bytes: int) -> int:
    """What the smallest cache, and the part of the card that is kept free, leave of what is free."""
    least_cache = (1 + len(layout.groups)) * layout.bytes_per_block
    is_by_share = config.num_gpu_blocks_override is None and config.kv_cache_memory_bytes is None
    kept_free = int(card.num_bytes * (1 - config.gpu_memory_utilization)) if is_by_share else 0
    return free_bytes - least_cache - kept_free


def _refuse_large_adapters(config: EngineConfig, adapter_bytes: int, free_bytes: int, spare: int) -> None:
    """`spare`: of the free bytes, what all else leaves. As `_refuse_large_steps`, save that adapters which do not fit
    beside the weights alone are always to blame."""
    max_loras = config.max_loras or DEFAULT_MAX_LORAS
    most = max(spare, 0) * max_loras // adapter_bytes if adapter_bytes else max_loras
    if adapter_bytes <= free_bytes and (most == 0 or most >= max_loras):
        return
    raise ConfigError(
        f"not enough memory for adapters: max_loras is {max_loras} and max_lora_rank {config.max_lora_rank}, for which"
        f" they take {show_bytes(adapter_bytes)}, and {show_bytes(free_bytes)} are left beside the weights; lower one"
        f" of them{f', max_loras to {most} at most' if most else ''}"
    )


def _refuse_large_steps(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, spare: int) -> None:
    """Where steps take more than all else spares: names the argument that takes most of it, and what would fit. Where
    no value of it would, something else is to blame, and nothing is said."""
    needed = _step_bytes(config, spec, dtype)
    if needed <= spare:
        return

    def bytes_at(name: str, number: int) -> int:
        change: dict[str, Any] = {name: number}
        return _step_bytes(replace(config, **change), spec, dtype)

    name = min(("max_num_seqs", "max_num_batched_tokens"), key=lambda name: bytes_at(name, 1))
    value = getattr(config, name)
    if most := bisect_right(range(1, value), spare, key=lambda number: bytes_at(name, number)):
        raise ConfigError(
            f"not enough memory for steps: {name} is {value}, for which they and what they keep take"
            f" {show_bytes(needed)}, and {show_bytes(spare)} are left for them (gpu_memory_utilization is"
            f" {config.gpu_memory_utilization:g}). Lower {name}; at most {most} would fit"
        )


def _step_bytes(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> int:
    """All that steps take beside weights and cache. Graphs have a pool of their own for the largest step, beside the
    step itself."""
    return _state_bytes(config, spec, dtype) + 2 * _largest_step_bytes(config, spec, dtype) + GRAPH_MEMORY


def _state_bytes(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> int:
    """The logits that all graphs share, and what the sampler keeps of the vocabulary by slot."""
    return config.max_num_seqs * spec.vocab_size * (dtype.itemsize + 1)


def _largest_step_bytes(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Nearly: what the tokens of a full step have at once between two layers, or its rows at the sampler."""
    attention = spec.attention
    qkv = (2 * attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    # Of experts each token has the parts of several.
    inner = max(layer.mlp.intermediate_size * getattr(layer.mlp, "top_k", 1) for layer in spec.layers)
    tokens = config.max_num_batched_tokens * dtype.itemsize * (4 * spec.hidden_size + max(qkv, inner))
    rows = config.max_num_seqs * spec.vocab_size * 6  # float32 logits, and what rules make of them
    return max(tokens, rows)
