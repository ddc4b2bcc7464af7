"""Biases, forbidden words and penalties: by hand values, against a plain reading of the formulas over transformers'
logits, and the same however a step is run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.step import JoinedRow
from cb_backend.contracts.token_rules import BOUNDS, TokenRules
from cb_backend.engine.runner.logits_rules import LogitsRules, RuledRows
from cb_backend.layers.ops import resolve_ops
from tests.engine.drive import engine_for, run
from tests.models.tiny_checkpoints import load_reference, random_tokens

INF = float("inf")
X = [2.0, -1.0, 0.5, 4.0, -3.0, 0.0]


def new_rules(vocab_size: int) -> LogitsRules:
    return LogitsRules(vocab_size, 8, torch.device("cpu"), resolve_ops("torch"))


def find(rules: LogitsRules, slot: int, num_tokens: int) -> RuledRows | None:
    return rules.find(np.array([slot], np.int32), np.array([0]), np.array([num_tokens], np.int32))


def ruled_row(params: TokenRules, prompt: list[int], output: list[int], logits: list[float] = X) -> list[float]:
    """One row through the rules: prompt known at the join, outputs recorded one by one as a runner does."""
    rules = new_rules(len(logits))
    rules.join([JoinedRow(3, 1, np.array(prompt, np.int32), len(prompt), (), params, (), 1000)])
    for count, token in enumerate(output):
        found = find(rules, 3, len(prompt) + count)
        assert found is not None
        rules.record(found, torch.tensor([token], dtype=torch.int32))
    found = find(rules, 3, len(prompt) + len(output))
    assert found is not None
    row = torch.tensor([logits])
    rules.apply(found, row)
    return row[0].tolist()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        # Prompt 0, 1; output 3, 3, 4.
        ({"repetition_penalty": 2.0}, [1.0, -2.0, 0.5, 2.0, -6.0, 0.0]),
        ({"repetition_penalty": 0.5}, [4.0, -0.5, 0.5, 8.0, -1.5, 0.0]),
        ({"presence_penalty": 1.5}, [2.0, -1.0, 0.5, 2.5, -4.5, 0.0]),
        ({"frequency_penalty": 2.0}, [2.0, -1.0, 0.5, 0.0, -5.0, 0.0]),
        ({"frequency_penalty": -2.0}, [2.0, -1.0, 0.5, 8.0, -1.0, 0.0]),
        ({"repetition_penalty": 2.0, "presence_penalty": 1.0}, [1.0, -2.0, 0.5, 1.0, -7.0, 0.0]),
        ({"logit_bias": {5: 100.0, 1: -0.5}}, [2.0, -1.5, 0.5, 4.0, -3.0, 100.0]),
        # The bias first, then the penalty on the sum.
        ({"logit_bias": {1: 3.0}, "repetition_penalty": 2.0}, [1.0, 1.0, 0.5, 2.0, -6.0, 0.0]),
        ({"allowed_token_ids": (1, 5)}, [-INF, -1.0, -INF, -INF, -INF, 0.0]),
        ({"bad_words_token_ids": ((3,), (0,))}, [-INF, -1.0, 0.5, -INF, -3.0, 0.0]),
    ],
)
def test_j4_hand_values(params: dict[str, object], expected: list[float]) -> None:
    """Case J4: repetition counts prompt and output, the other two the output only."""
    assert ruled_row(TokenRules(**params), [0, 1], [3, 3, 4]) == expected


@pytest.mark.parametrize(("name", "value"), [("repetition_penalty", 0.0), ("repetition_penalty", -1.0),
    ("repetition_penalty", 100.5), ("frequency_penalty", 2.01), ("presence_penalty", -2.5),
    ("frequency_penalty", float("nan")), ("logit_bias", {3: 100.1}), ("logit_bias", {97: 1.0}),
    ("allowed_token_ids", (97,)), ("bad_words_token_ids", ((97,),)), ("bad_words_token_ids", ((),)),
])  # fmt: skip
def test_j4_values_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=name.removesuffix("_token_ids")):
        TokenRules(**{name: value}).check(vocab_size=97)


def test_what_a_request_leaves_as_it_is_needs_no_check() -> None:
    """`SamplingRules.check` passes over the defaults."""
    defaults = dict(zip(TokenRules.__struct_fields__, TokenRules.__struct_defaults__, strict=True))
    for name, (low, high) in BOUNDS.items():
        assert defaults[name] is None or low <= defaults[name] <= high, name


def test_k3_a_word_of_two_tokens_bans_the_second_only_after_the_first() -> None:
    """Case K3, and two words that end on one token: one match is enough."""
    params = TokenRules(bad_words_token_ids=((2, 3), (4, 3), (0, 1, 5)))
    assert ruled_row(params, [0], [0]) == X
    assert ruled_row(params, [0], [2])[3] == -INF
    assert ruled_row(params, [0, 4], [])[3] == -INF  # the prompt's end counts
    assert ruled_row(params, [0], [1])[5] == -INF
    assert ruled_row(params, [1], [0, 2])[5] == 0.0
    assert ruled_row(params, [1], []) == X  # shorter than the words


def test_a_slot_forgets_the_rules_of_the_request_before() -> None:
    rules = new_rules(6)
    tokens = np.array([1], np.int32)
    for params in ({"logit_bias": {1: 5.0}}, {"presence_penalty": 1.0}, {"bad_words_token_ids": ((1,),)}):
        rules.join([JoinedRow(0, 1, tokens, 1, (), TokenRules(**params), (), 1000)])
        assert find(rules, 0, 1) is not None
        rules.join([JoinedRow(0, 2, tokens, 1, (), TokenRules(), (), 1000)])
        assert find(rules, 0, 1) is None
    # The next request with rules has its own only, and a row of marks that was another's is clean.
    rules.join([JoinedRow(0, 3, np.array([2], np.int32), 1, (), TokenRules(repetition_penalty=2.0), (), 1000)])
    found = find(rules, 0, 1)
    assert found is not None
    row = torch.ones(1, 6)
    rules.apply(found, row)
    assert row[0].tolist() == [1.0, 1.0, 0.5, 1.0, 1.0, 1.0]


def test_as_many_slots_as_there_are_can_have_penalties() -> None:
    rules = new_rules(6)
    slots = np.arange(8, dtype=np.int32)
    for slot in slots.tolist():
        params = TokenRules(presence_penalty=0.1 * slot, frequency_penalty=0.01)
        rules.join([JoinedRow(slot, slot, np.array([0, slot % 6], np.int32), 1, (), params, (), 1000)])
    found = rules.find(slots, np.arange(8), np.full(8, 2, np.int32))
    assert found is not None
    rows = torch.zeros(8, 6)
    rules.apply(found, rows)
    for slot in slots.tolist():
        assert rows[slot, slot % 6].item() == pytest.approx(-0.1 * slot - 0.01)
        assert rows[slot].count_nonzero() == 1


# ---- the whole engine --------------------------------------------------------------------------------------------

PROMPTS = [random_tokens(length, seed=length) for length in (5, 17, 9, 6, 12)]
RULES = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"logit_bias": {7: 6.0, 8: 5.5}, "frequency_penalty": 2.0},
    {"allowed_token_ids": (5, 6, 7, 8, 9, 10), "presence_penalty": 2.0},
    {},
]
NUM_TOKENS = 14


def params_of(rules: dict[str, object], **changes: object) -> TokenRules:
    greedy = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "seed": 0, "ignore_eos": True}
    return TokenRules(**{**greedy, **rules, **changes})


def apply_plainly(x: np.ndarray, params: TokenRules, prompt: list[int], output: list[int]) -> np.ndarray:
    """The documented rules, one token at a time."""
    y = x.astype(np.float64).copy()
    for token in range(len(y)):
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            y[token] = -np.inf
        for word in params.bad_words_token_ids:
            if token == word[-1] and (prompt + output)[len(prompt + output) - len(word) + 1 :] == list(word[:-1]):
                y[token] = -np.inf
        y[token] += params.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            y[token] = y[token] / params.repetition_penalty if y[token] > 0 else y[token] * params.repetition_penalty
        y[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
    return y


@torch.inference_mode()
def greedy_by_hand(folder: Path, prompt: list[int], params: TokenRules) -> list[int]:
    model = load_reference(folder)
    output: list[int] = []
    while len(output) < params.max_tokens:
        logits = model(torch.tensor([prompt + output])).logits[0, -1].numpy()
        output.append(int(apply_plainly(logits, params, prompt, output).argmax()))
    return output


@pytest.fixture(scope="module")
def all_params(gqa_folder: Path) -> list[TokenRules]:
    """The rules above, and last the bad words: what the last prompt would bring, in parts of one to three tokens."""
    free = greedy_by_hand(gqa_folder, PROMPTS[4], params_of({}))
    words = ((free[0],), tuple(free[1:3]), tuple(free[4:7]))
    return [params_of(rules) for rules in RULES] + [params_of({"bad_words_token_ids": words})]


@pytest.fixture(scope="module")
def expected(gqa_folder: Path, all_params: list[TokenRules]) -> list[list[int]]:
    prompts = [*PROMPTS, PROMPTS[4]]
    return [greedy_by_hand(gqa_folder, prompt, params) for prompt, params in zip(prompts, all_params, strict=True)]


@pytest.mark.parametrize(("kind", "run_ahead"), [("reference", 0), ("slots", 0), ("slots", 4)])
def test_j3_rules_beside_rows_without_any(
    gqa_folder: Path, all_params: list[TokenRules], expected: list[list[int]], kind: str, run_ahead: int
) -> None:
    """Case J3: joins and leaves in nearly every step; K4: every rule shows; the row without rules is untouched."""
    engine = engine_for(gqa_folder, kind, run_ahead=run_ahead)
    got = run(engine, [*PROMPTS, PROMPTS[4]], all_params, arrivals=[0, 0, 1, 3, 5, 8])
    assert [got.token_ids[index] for index in range(6)] == expected
    plain = run(engine_for(gqa_folder, kind), [*PROMPTS, PROMPTS[4]], params_of({}))
    for index, params in enumerate(all_params):
        assert (plain.token_ids[index] != expected[index]) == params.has_logits_rules
    assert engine.stats().num_free_blocks == engine.info.num_blocks


def test_j1_k3_preemption_and_cached_prefixes_change_nothing(
    gqa_folder: Path, all_params: list[TokenRules], expected: list[list[int]]
) -> None:
    """Cases J1 and K3: cold, warm and half warm, and computed again after a preemption."""
    for kind in ("reference", "slots"):
        tight = engine_for(gqa_folder, kind, num_gpu_blocks_override=12, run_ahead=0 if kind == "reference" else 2)
        for _ in range(2):
            got = run(tight, [*PROMPTS, PROMPTS[4]], all_params)
            assert [got.token_ids[index] for index in range(6)] == expected
        stats = tight.stats()
        assert stats.num_preemptions > 0
        warm = engine_for(gqa_folder, kind)
        half = [*PROMPTS[1][:9], 3, 4, 5]
        for prompt in (half, PROMPTS[1], PROMPTS[1]):
            got = run(warm, [prompt], all_params[0])
            assert got.token_ids[0] == greedy_by_hand(gqa_folder, prompt, all_params[0])
        assert warm.stats().num_cached_prompt_tokens >= 8 + 16


def test_i5_ids_at_the_end_of_the_vocabulary(gqa_folder: Path) -> None:
    """Case I5: the last id works with penalties; ids beyond are refused at the door."""
    engine = engine_for(gqa_folder, "reference")
    last = engine.info.vocab_size - 1
    params = params_of({"repetition_penalty": 1.5, "frequency_penalty": 1.0, "logit_bias": {last: 100.0}})
    got = run(engine, [[last, 5, last]], params)
    assert got.token_ids[0] == greedy_by_hand(gqa_folder, [last, 5, last], params)
    assert last in got.token_ids[0]
    for bad in (last + 1, last + 6, -1):
        with pytest.raises(InvalidRequestError, match=f"token id {bad} is outside the vocabulary"):
            engine.make_request(1, np.array([5, bad], np.int32), params)


def test_rules_and_figures_together(gqa_folder: Path) -> None:
    """Log-probabilities stay the model's own where rules change the choice."""
    engine = engine_for(gqa_folder, "slots", run_ahead=2)
    params = params_of({"logit_bias": {7: 100.0}}, max_tokens=3, logprobs=1)
    got = run(engine, [PROMPTS[0]], params)
    plain = run(engine, [PROMPTS[0]], msgspec.structs.replace(params, logit_bias={}))
    assert got.token_ids[0] == [7, 7, 7]
    assert got.logprobs[0][0].rank > 1
    assert got.logprobs[0][0].top_ids == [plain.token_ids[0][0]]
    assert got.logprobs[0][0].top == pytest.approx(plain.logprobs[0][0].top)


def test_temperature_and_min_tokens_work_on_ruled_logits(gqa_folder: Path) -> None:
    engine = engine_for(gqa_folder, "slots", run_ahead=1)
    rules = {"allowed_token_ids": (2, 40, 41), "stop_token_ids": (40,), "min_tokens": 6, "ignore_eos": False}
    got = run(engine, [PROMPTS[0]], params_of(rules, temperature=1.5, seed=9))
    tokens = got.token_ids[0]
    assert set(tokens[:6]) == {41}  # 2 ends sequences and 40 stops: neither before 6 tokens are out
    assert set(tokens) <= {2, 40, 41}
