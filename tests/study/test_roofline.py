"""The limits against tables worked out by hand from public configs: pytest tests/cli/test_bench_roofline.py

Bandwidth 3.0 TB/s and 790 TFLOP/s throughout.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from cb_backend.study.roofline import (
    CardLimits,
    ModelShape,
    decode_seconds,
    ideal_schedule,
    prefill_seconds,
    step_seconds,
)

CARD = CardLimits(bandwidth=3.0e12, flops=790e12)


def shape(hidden: int, layers: int, heads: int, kv_heads: int, dim: int, mlp: int, vocab: int) -> ModelShape:
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        intermediate_size=mlp,
        vocab_size=vocab,
    )


SHAPES = {
    "Qwen3-0.6B": shape(1024, 28, 16, 8, 128, 3072, 151936),
    "Llama-3.2-1B": shape(2048, 16, 32, 8, 64, 8192, 128256),
    "Qwen2.5-1.5B": shape(1536, 28, 12, 2, 128, 8960, 151936),
    "Qwen2.5-7B": shape(3584, 28, 28, 4, 128, 18944, 152064),
    "Llama-3.1-8B": shape(4096, 32, 32, 8, 128, 14336, 128256),
    "Qwen3-8B": shape(4096, 36, 32, 8, 128, 12288, 151936),
}
BATCHES = ((1, 512), (32, 512), (128, 512), (256, 512), (1, 2048), (32, 2048), (128, 2048), (256, 2048))
# Tokens a second of a decode step for each of BATCHES (rows, context).
DECODE_TOKENS = {
    "Qwen3-0.6B": (2398, 31063, 43706, 46887, 2102, 11000, 12255, 12492),
    "Llama-3.2-1B": (1205, 31738, 81970, 111340, 1182, 20710, 34510, 38822),
    "Qwen2.5-1.5B": (967, 26843, 76130, 109701, 953, 19255, 35951, 42024),
    "Qwen2.5-7B": (212, 6358, 21361, 35209, 210, 5358, 13128, 17312),
    "Llama-3.1-8B": (199, 5590, 16227, 23762, 196, 4065, 7768, 9158),
    "Qwen3-8B": (197, 5463, 15436, 22184, 194, 3868, 7128, 8294),
}
PREFILL_TOKENS = {  # tokens a second of one prompt of 512, 2048, 8192
    "Qwen3-0.6B": (840e3, 708e3, 434e3),
    "Llama-3.2-1B": (399e3, 380e3, 318e3),
    "Qwen2.5-1.5B": (296e3, 282e3, 238e3),
    "Llama-3.1-8B": (56.0e3, 54.5e3, 49.0e3),
    "Qwen3-8B": (56.2e3, 54.5e3, 48.4e3),
}
CEILINGS = {  # output tokens a second of the 256 requests of W1
    "Qwen3-0.6B": 25639,
    "Llama-3.2-1B": 52634,
    "Qwen2.5-1.5B": 49272,
    "Llama-3.1-8B": 10325,
    "Qwen3-8B": 9797,
}


@pytest.mark.parametrize(
    ("name", "weight_gb", "kv_bytes"),
    [("Qwen3-0.6B", 1.19, 114688), ("Llama-3.2-1B", 2.47, 32768), ("Llama-3.1-8B", 15.01, 131072)],
)
def test_bytes(name: str, weight_gb: float, kv_bytes: int) -> None:
    assert SHAPES[name].bytes_per_step / 1e9 == pytest.approx(weight_gb, abs=0.006)
    assert SHAPES[name].kv_bytes_per_token == kv_bytes


@pytest.mark.parametrize("name", DECODE_TOKENS)
def test_decode_floor(name: str) -> None:
    found = [rows / decode_seconds(SHAPES[name], CARD, rows, rows * context) for rows, context in BATCHES]
    assert found == pytest.approx(DECODE_TOKENS[name], rel=0.01)


@pytest.mark.parametrize("name", PREFILL_TOKENS)
def test_prefill_floor(name: str) -> None:
    found = [length / prefill_seconds(SHAPES[name], CARD, [length]) for length in (512, 2048, 8192)]
    assert found == pytest.approx(PREFILL_TOKENS[name], rel=0.01)


@pytest.mark.parametrize("name", CEILINGS)
def test_ceiling_of_w1(name: str) -> None:
    source = random.Random(0)
    prompt_lens = [len([source.randint(0, 10000) for _ in range(source.randint(100, 1024))]) for _ in range(256)]
    output_lens = [source.randint(100, 1024) for _ in range(256)]
    ideal = ideal_schedule(SHAPES[name], CARD, prompt_lens, output_lens)
    assert sum(output_lens) / ideal.seconds == pytest.approx(CEILINGS[name], rel=0.01)


def test_a_short_prompt_still_reads_every_weight() -> None:
    llama = SHAPES["Llama-3.1-8B"]
    assert prefill_seconds(llama, CARD, [16]) == pytest.approx(15.009e9 / 3.0e12, rel=1e-3)


def test_chunks_of_a_prompt_add_up_to_its_flops() -> None:
    """Two chunks of 4,096 have the pairs of one prompt of 8,192; the second reads the first's keys and values."""
    qwen = SHAPES["Qwen3-0.6B"]
    whole = step_seconds(
        qwen, CARD, num_tokens=8192, num_sampling_rows=1, num_read_tokens=0, num_attention_pairs=8192**2 / 2
    )
    first = step_seconds(
        qwen, CARD, num_tokens=4096, num_sampling_rows=0, num_read_tokens=0, num_attention_pairs=4096**2 / 2
    )
    second = step_seconds(
        qwen, CARD, num_tokens=4096, num_sampling_rows=1, num_read_tokens=4096, num_attention_pairs=4096**2 * 1.5
    )
    assert first + second - whole == pytest.approx(4096 * 114688 / 3.0e12, rel=1e-6)


def test_a_small_cache_makes_the_ideal_schedule_longer() -> None:
    llama = SHAPES["Llama-3.2-1B"]
    free = ideal_schedule(llama, CARD, [100] * 4, [51] * 4)
    tight = ideal_schedule(llama, CARD, [100] * 4, [51] * 4, max_cached_tokens=302)
    assert (free.num_steps, tight.num_steps) == (50, 100)  # two requests of 151 at a time
    assert ideal_schedule(llama, CARD, [100], [51], max_cached_tokens=10).num_steps == 50  # one always runs


def test_a_shared_prefix_is_computed_once() -> None:
    llama = SHAPES["Llama-3.1-8B"]
    alone = ideal_schedule(llama, CARD, [2112] * 64, [1] * 64)
    shared = ideal_schedule(llama, CARD, [2112] * 64, [1] * 64, num_shared_prompt_tokens=[0] + [2048] * 63)
    # One prompt of 2,112 and 63 times 64 tokens against 64 prompts of 2,112: that share of the linear work is left, and
    # a few percent more, because the 64 tokens attend to the whole prefix and every prompt needs logits.
    assert 1.0 < shared.prefill_seconds / alone.prefill_seconds / (6144 / 135168) < 1.04
    assert alone.num_steps == shared.num_steps == 0  # one output token each: the prompt brings it


def test_fp8_halves_the_layers_bytes_and_their_arithmetic_but_not_the_heads() -> None:
    plain = SHAPES["Llama-3.1-8B"]
    narrow = replace(plain, weight_bytes=1.0, head_bytes=2.0, layer_speed=2.0, kv_element_bytes=1.0)
    assert narrow.bytes_per_step == plain.layer_params + 2 * plain.head_params
    assert narrow.kv_bytes_per_token == plain.kv_bytes_per_token / 2
    assert 1e3 * decode_seconds(narrow, CARD, 1, 1024) == pytest.approx(2.70, abs=0.01)
    long = [prefill_seconds(shape, CARD, [256] * 64) for shape in (plain, narrow)]
    assert long[0] / long[1] == pytest.approx(2, rel=0.03)  # the attention and the head are the rest


def test_layers_with_a_window_read_no_more_than_it() -> None:
    full = SHAPES["Llama-3.1-8B"]
    half = replace(full, windows=(0, 128) * (full.num_layers // 2))
    contexts = np.array([100, 128, 1000, 5000])
    assert half.tokens_read(contexts) == (contexts.sum() + 100 + 3 * 128) / 2
    assert full.tokens_read(contexts) == replace(full, windows=(0,) * full.num_layers).tokens_read(contexts) == 6228
    assert decode_seconds(half, CARD, 4, 400) == pytest.approx(decode_seconds(full, CARD, 4, 400))
    saved = decode_seconds(full, CARD, 64, 64 * 4096) - decode_seconds(half, CARD, 64, 64 * 4096)
    assert saved == pytest.approx(64 * (4096 - 128) / 2 * full.kv_bytes_per_token / CARD.bandwidth)


@pytest.mark.parametrize(("earlier", "chunk"), [(0, 100), (0, 3000), (60, 100), (2000, 512), (90, 10)])
def test_prompts_see_each_other_within_the_window_alone(earlier: int, chunk: int) -> None:
    windowed = replace(SHAPES["Llama-3.1-8B"], windows=(100,) * 24 + (0,) * 8)
    position = np.arange(earlier, earlier + chunk)
    wanted = (24 * np.minimum(position + 0.5, 100).sum() + 8 * (position + 0.5).sum()) / 32
    assert windowed.attention_pairs(np.array([earlier]), np.array([chunk])) == pytest.approx(wanted, rel=1e-6)
    assert prefill_seconds(windowed, CARD, [9000]) < prefill_seconds(replace(windowed, windows=()), CARD, [9000])


def test_a_schedule_of_long_answers_takes_less_with_windows() -> None:
    full = SHAPES["Llama-3.1-8B"]
    slow, fast = (
        ideal_schedule(replace(full, windows=windows), CARD, [2000] * 64, [500] * 64)
        for windows in ((), (256,) * full.num_layers)
    )
    assert fast.num_steps == slow.num_steps
    read = 64 * full.kv_bytes_per_token / CARD.bandwidth
    assert slow.decode_seconds - fast.decode_seconds == pytest.approx(499 * read * (2000 + 250 - 256), rel=0.01)
