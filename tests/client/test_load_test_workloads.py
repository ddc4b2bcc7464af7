"""What the load test sends and when: gaps, lengths, traces, prompts. pytest tests/client/test_load_test_workloads.py"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from load_generator.options import Load, check, lengths, loads, parser, plan_run
from load_generator.prompts import PromptBuilder, Vocabulary, calibrate, vocabulary_of_tokenizer

from cb_backend.traffic.traces import TraceError, read_trace
from cb_backend.traffic.workload import (
    LengthDistribution,
    PlannedRequest,
    WorkloadError,
    arrival_times,
    scaled_trace_times,
)

# Schedules and lengths


@pytest.mark.parametrize(
    ("kind", "cv", "expected_cv"), [("poisson", 9.0, 1.0), ("gamma", 2.0, 2.0), ("gamma", 0.5, 0.5)]
)
def test_gaps_have_the_wanted_mean_and_variation(kind: str, cv: float, expected_cv: float) -> None:
    gaps = np.diff(arrival_times(kind, 50.0, 100_000, np.random.default_rng(1), cv))
    assert gaps.min() >= 0
    # The mean of n gaps has a standard error of cv / sqrt(n): four of them.
    assert gaps.mean() == pytest.approx(1 / 50, rel=4 * expected_cv / math.sqrt(100_000))
    assert gaps.std() / gaps.mean() == pytest.approx(expected_cv, rel=0.04)


def test_poisson_counts_per_second_have_equal_mean_and_variance() -> None:
    times = arrival_times("poisson", 20.0, 200_000, np.random.default_rng(2))
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.mean() == pytest.approx(20, rel=0.02)
    assert counts.var() == pytest.approx(20, rel=0.08)


def test_constant_and_all_at_once() -> None:
    rng = np.random.default_rng(0)
    assert arrival_times("constant", 4.0, 4, rng).tolist() == [0.25, 0.5, 0.75, 1.0]
    assert arrival_times("poisson", math.inf, 3, rng).tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(WorkloadError, match="--rate must be above 0, got 0"):
        arrival_times("poisson", 0.0, 3, rng)


def test_length_distributions() -> None:
    rng = np.random.default_rng(3)
    assert LengthDistribution.parse("7").sample(rng, 2).tolist() == [7, 7]
    uniform = LengthDistribution.parse("uniform:3:5").sample(rng, 3000)
    assert np.bincount(uniform).nonzero()[0].tolist() == [3, 4, 5]
    lognormal = LengthDistribution.parse("lognormal:220:0.8").sample(rng, 200_000)
    assert lognormal.mean() == pytest.approx(220, rel=0.02)
    assert np.median(lognormal) == pytest.approx(220 * math.exp(-(0.8**2) / 2), rel=0.02)
    assert LengthDistribution.parse("lognormal:220:0.8:300").sample(rng, 1000).max() == 300


@pytest.mark.parametrize("text", ["", "0", "x", "uniform:5", "uniform:5:3", "lognormal:10", "normal:1:2", "fixed:nan"])
def test_bad_length_is_named(text: str) -> None:
    with pytest.raises(WorkloadError, match=f"length '{text}'"):
        LengthDistribution.parse(text)


# Traces

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
MOONCAKE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1300, "output_length": 6, "hash_ids": [0, 1, 9]},
    {"timestamp": 4000, "input_length": 700, "output_length": 7, "hash_ids": [4, 5]},
]


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_azure_csv(tmp_path: Path) -> None:
    rows = read_trace(_write(tmp_path / "a.csv", AZURE))
    assert [(row.num_prompt_tokens, row.num_output_tokens) for row in rows] == [(374, 44), (396, 109)]
    assert [row.arrival_s for row in rows] == pytest.approx([0.0, 4.314579])


def test_mooncake_jsonl(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.jsonl", "\n".join(json.dumps(row) for row in MOONCAKE) + "\n")
    rows = read_trace(path)
    assert [row.arrival_s for row in rows] == [0.0, 0.5, 3.0]
    assert [row.prefix_ids for row in rows] == [(0, 1, 2), (0, 1, 9), (4, 5)]
    assert [(row.num_prompt_tokens, row.arrival_s) for row in read_trace(path, offset=1, limit=1)] == [(1300, 0.0)]
    assert scaled_trace_times(rows, time_scale=0.5, rate=None).tolist() == [0.0, 0.25, 1.5]
    assert scaled_trace_times(rows, time_scale=1.0, rate=4.0).tolist() == pytest.approx([0.0, 1 / 12, 0.5])


def test_csv_with_length_columns(tmp_path: Path) -> None:
    path = _write(tmp_path / "s.csv", "id,prompt_len,output_len,chars\n1,10,20,99\n2,11,0,99\n3,12,22,98\n")
    assert [(r.num_prompt_tokens, r.num_output_tokens, r.arrival_s) for r in read_trace(path)] == [
        (10, 20, None),
        (12, 22, None),  # the row without any output cannot be asked for
    ]
    assert [r.num_prompt_tokens for r in read_trace(path, input_column="chars")] == [99, 98]
    with pytest.raises(TraceError, match="no column tokens, only id, prompt_len"):
        read_trace(path, input_column="tokens")
    with pytest.raises(WorkloadError, match="has no times"):
        scaled_trace_times(read_trace(path), time_scale=1.0, rate=None)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("input_len,output_len\nten,3\n", "bad.csv, line 2: input_len is 'ten', not a whole number"),
        ("input_len,output_len\n10,3\n10\n", "bad.csv, line 3: the row ends before column output_len"),
        (
            "input_len,output_len,arrival_s\n10,3,soon\n",
            "bad.csv, line 2: arrival_s is 'soon', not a number of seconds",
        ),
        (AZURE + "yesterday,1,2\n", "bad.csv, line 4: TIMESTAMP is 'yesterday', not a time like 2023-11-16 18:17:03"),
        (AZURE + "2023-11-16 18:15:51.0\n", "bad.csv, line 4: the row ends before column ContextTokens"),
        ("", "bad.csv is empty"),
    ],
)
def test_a_bad_line_of_a_csv_is_named_with_its_column(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(TraceError, match=re.escape(complaint)):
        read_trace(_write(tmp_path / "bad.csv", text))


def test_options_make_a_trace_workload(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.jsonl", "\n".join(json.dumps(row) for row in MOONCAKE))
    args = parser().parse_args(
        ["--arrival", "trace", "--trace", str(path), "--time-scale", "2", "--duration", "3", "--max-input-len", "1200"]
    )
    check(args)
    (load,) = loads(args)
    plans = plan_run(args, load, lengths(args), seed=0)
    assert [(p.scheduled_s, p.num_prompt_tokens, p.num_output_tokens) for p in plans] == [
        (0.0, 1100, 5),
        (1.0, 1200, 6),
    ]
    assert load.to_json() == {"kind": "trace", "value": None, "label": "trace, gaps x 2"}


def test_contradicting_options_are_refused() -> None:
    for given, text in (
        ([], "no load"),
        (["--rate", "1", "--concurrency", "1"], "one of them"),
        (["--concurrency", "0"], "at least 1, got 0"),
    ):
        with pytest.raises(WorkloadError, match=text):
            loads(parser().parse_args(given))


def test_cancel_fraction_and_points() -> None:
    args = parser().parse_args(
        ["--rate", "inf", "--num-requests", "4000", "--cancel-fraction", "0.25", "--output-len", "8"]
    )
    plans = plan_run(args, Load("rate", math.inf, ""), lengths(args), seed=5)
    points = [p.cancel_after_tokens for p in plans if p.cancel_after_tokens is not None]
    assert len(points) / 4000 == pytest.approx(0.25, abs=0.03)
    assert sorted(set(points)) == list(range(8))


# Prompts


def _words(builder: PromptBuilder, request_id: int, num_tokens: int, prefix_ids: tuple[int, ...] = ()) -> list[str]:
    return builder.build(PlannedRequest(request_id, 0.0, num_tokens, 1, prefix_ids)).split(" ")


def test_prompts_share_text_exactly_where_ids_are_shared() -> None:
    builder = PromptBuilder(Vocabulary(), seed=1)
    first, second = _words(builder, 0, 1300, (0, 1, 2)), _words(builder, 1, 1400, (0, 1, 9))
    assert (len(first), len(second)) == (1300, 1400)
    assert first[:1024] == second[:1024]
    assert first[1024:1044] != second[1024:1044]
    # A last id stands for a part of a block; beyond the ids the text is the request's own.
    assert _words(builder, 2, 1100, (0, 1, 2)) == first[:1100]
    longer = [_words(builder, request_id, 600, (0,)) for request_id in (3, 4)]
    assert longer[0][:512] == longer[1][:512] == first[:512]
    assert longer[0][512:] != longer[1][512:]


def test_prompts_depend_on_seed_and_request_alone() -> None:
    builder = PromptBuilder(Vocabulary(), seed=1)
    assert _words(builder, 3, 50) == _words(PromptBuilder(Vocabulary(), seed=1), 3, 50)
    assert _words(builder, 3, 50) != _words(builder, 4, 50)
    assert _words(builder, 3, 50) != _words(PromptBuilder(Vocabulary(), seed=2), 3, 50)


def test_calibration_finds_cost_and_constant() -> None:
    vocabulary = calibrate(lambda text: 5 + 3 * len(text.split()), "server")
    assert (vocabulary.tokens_per_word, vocabulary.num_extra_tokens) == (3.0, 5.0)
    assert [vocabulary.num_words(n) for n in (305, 306, 1)] == [100, 100, 1]
    with pytest.raises(ValueError, match="counted as"):
        calibrate(lambda text: 9, "server")


def test_tokenizer_gives_exact_lengths(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    # A byte-level BPE trained on half of the words: only those are one token each.
    known = sorted(Vocabulary().words)[::2]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=5000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(known)] * 3, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = vocabulary_of_tokenizer(str(tmp_path / "tokenizer.json"))
    assert set(known) <= set(vocabulary.words) < set(Vocabulary().words)
    builder = PromptBuilder(vocabulary, seed=3)
    for num_tokens in (1, 77, 1025):
        text = builder.build(PlannedRequest(num_tokens, 0.0, num_tokens, 1, (7, 8)))
        assert len(tokenizer.encode(text).ids) == num_tokens
