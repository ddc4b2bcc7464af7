"""Workloads are what they claim, request for request: pytest tests/cli/test_bench_workloads.py

Totals and digests were computed with the peer engines' own scripts, not with this package.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from cb_backend.contracts.errors import ConfigError
from cb_backend.study.workloads import (
    WORKLOADS,
    Draw,
    Workload,
    expand_names,
    latency_pairs,
    lengths_digest,
)
from cb_backend.traffic.traces import TraceError

VOCAB = 128_256
TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:01.0000000,879,1
"""


def draw(name: str, **changes: object) -> Workload:
    return WORKLOADS[name](Draw(VOCAB, **changes))  # type: ignore[arg-type]


def test_w1_is_nano_vllms_draw() -> None:
    workload = draw("W1")
    assert (sum(workload.prompt_lens), sum(workload.output_lens)) == (142_827, 133_966)
    assert workload.prompts[0][:5].tolist() == [6311, 6890, 663, 4242, 8376]
    assert workload.prompts[255][-3:].tolist() == [6642, 9046, 1958]
    assert workload.output_lens[:4] == [845, 312, 607, 843]


def test_w1_repeats_the_lengths_with_other_ids() -> None:
    first, second = draw("W1"), draw("W1", repetition=1)
    assert second.prompt_lens == first.prompt_lens
    assert second.output_lens == first.output_lens
    assert second.prompts[0][:5].tolist() == [960, 3244, 1495, 9102, 6181]  # random.Random(1001).randrange(0, 10001)


def test_c_is_the_peers_draw() -> None:
    workload = draw("c")
    assert (sum(workload.prompt_lens), sum(workload.output_lens)) == (518_246, 253_712)
    assert workload.prompt_lens[:5] == [383, 436, 650, 404, 999]
    assert workload.output_lens[:5] == [290, 295, 198, 320, 217]


def test_b_pairs_one_token_with_256() -> None:
    pairs = latency_pairs(Draw(VOCAB), 3)
    assert len(pairs) == 4  # the first warms up
    assert [(short.prompt_lens, short.output_lens, full.output_lens) for short, full in pairs[1:]] == [
        ([128], [1], [256])
    ] * 3
    assert len({prompt.prompts[0].tobytes() for pair in pairs[1:] for prompt in pair}) == 6  # no prompt comes twice


def test_pairs_of_several_rows_are_the_peers_too() -> None:
    (_, warm_up), (short, full) = latency_pairs(Draw(VOCAB), 1, "d8")
    assert (short.name, short.prompt_lens, short.output_lens) == ("d8", [128] * 8, [1] * 8)
    assert full.output_lens == warm_up.output_lens == [257] * 8
    prompts = {prompt.tobytes() for workload in (warm_up, short, full) for prompt in workload.prompts}
    assert len(prompts) == 24  # none twice
    assert expand_names("b,d8,d256,a") == ["b", "d8", "d256", "W1"]


def test_pairs_of_another_number_of_rows_are_not_known() -> None:
    with pytest.raises(ConfigError, match=r"workload 'd9' is not known; use .* d256"):
        expand_names("d9")


@pytest.mark.parametrize("name", ["W1", "W3", "W5-1x64", "W7-8", "W8"])
def test_ids_fit_a_small_vocabulary(name: str) -> None:
    workload = WORKLOADS[name](Draw(500))
    assert max(int(prompt.max()) for prompt in workload.prompts) < 500
    assert min(int(prompt.min()) for prompt in workload.prompts) >= 0


def test_w2_has_the_four_published_points() -> None:
    lengths = {name: (set(draw(name).prompt_lens), set(draw(name).output_lens)) for name in expand_names("W2")}
    assert lengths == {
        "W2-128-128": ({128}, {128}),
        "W2-1000-1000": ({1000}, {1000}),
        "W2-2048-128": ({2048}, {128}),
        "W2-128-2048": ({128}, {2048}),
    }


def test_w3_has_the_published_means_and_the_asked_rate() -> None:
    workload = draw("W3", rate=20.0)
    assert np.mean(workload.prompt_lens) == pytest.approx(220, rel=0.1)
    assert np.mean(workload.output_lens) == pytest.approx(200, rel=0.1)
    assert max(workload.prompt_lens + workload.output_lens) <= 1024
    assert len(workload.arrivals) / workload.arrivals[-1] == pytest.approx(20, rel=0.1)
    assert workload.arrivals == sorted(workload.arrivals)
    assert draw("W3", rate=math.inf).is_offline


def test_w4_replays_the_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    workload = draw("W4", trace=trace)
    assert (workload.prompt_lens, workload.output_lens) == ([374, 396, 879], [44, 109, 1])
    assert workload.arrivals == pytest.approx([0.0, 4.314579, 14.31941], abs=1e-5)
    # Two gaps at 4 requests/s last half a second; their shares stay.
    assert draw("W4", trace=trace, rate=4.0).arrivals == pytest.approx([0.0, 0.150654, 0.5], abs=1e-5)


def test_w4_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--trace FILE"):
        draw("W4")
    with pytest.raises(TraceError, match="cannot be read"):
        draw("W4", trace=tmp_path / "absent.csv")
    (tmp_path / "bad.csv").write_text(TRACE + "yesterday,1,2\n")
    with pytest.raises(TraceError, match="line 5: TIMESTAMP is 'yesterday', not a time like 2023"):
        draw("W4", trace=tmp_path / "bad.csv")


def test_w5_shares_prefixes() -> None:
    workload = draw("W5-8x32")
    assert len(workload.prompts) == 256
    prefixes = [prompt[:2048].tobytes() for prompt in workload.prompts]
    assert len(set(prefixes)) == 8
    assert all(prefixes.count(prefix) == 32 for prefix in set(prefixes))
    assert len({prompt[2048:].tobytes() for prompt in workload.prompts}) == 256
    assert workload.num_shared_tokens is not None
    first_seen = [prefix not in prefixes[:index] for index, prefix in enumerate(prefixes)]
    assert workload.num_shared_tokens == [0 if is_first else 2048 for is_first in first_seen]


def test_w8_sends_a_long_prompt_each_second() -> None:
    workload = draw("W8")
    assert [at for at, length in zip(workload.arrivals, workload.prompt_lens, strict=True) if length == 8192] == [
        1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0
    ]  # fmt: skip
    assert workload.arrivals[:32] == [0.0] * 32
    assert workload.max_total_tokens == 8193


def test_digest_tells_lengths_apart() -> None:
    assert draw("W1").lengths_digest == draw("W1", repetition=2).lengths_digest
    assert lengths_digest([1, 2], [3, 4]) != lengths_digest([1, 2], [4, 3])
    assert lengths_digest([12], [3]) != lengths_digest([1], [23])


def test_names_expand() -> None:
    assert expand_names("a,b,W6,W1") == ["W1", "b", "W6-8", "W6-32"]
    assert expand_names("long") == ["long-1x32k", "long-64x8k"]
    with pytest.raises(ConfigError, match="'W9' is not known"):
        expand_names("a,W9")


def test_first_keeps_everything_aligned() -> None:
    workload = draw("W5-8x32").first(10)
    assert workload.num_shared_tokens == [0] * 8 + [2048] * 2
    assert len(workload.prompts) == len(workload.output_lens) == len(workload.arrivals) == 10
