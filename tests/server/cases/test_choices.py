"""Kinds I, J and K, which token is chosen: top_k and its kin, penalties, bad words."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fakes.scripted_model import script
from tests.server.cases.case import Case, assert_clean, over_transports
from tests.server.cases.conftest import BLOCK_SIZE, Floor
from tests.server.cases.transports import TRANSPORTS, Wire
from tests.server.tiny_checkpoint import VOCAB_SIZE
from tests.waiting import eventually

GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}


@pytest.mark.server
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_i1_every_top_k_in_one_batch_with_greedy(wire: Wire, transport: str) -> None:
    greedy = wire.ask(transport, "llm", GREEDY, text_input="the quick").text()
    drawn = {**GREEDY, "temperature": 1.0, "seed": 1}
    top_ks = (0, -1, 1, VOCAB_SIZE, VOCAB_SIZE + 1, 10**7)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(wire.ask, transport, "llm", {**drawn, "top_k": k}, text_input="the quick") for k in top_ks]
        assert wire.ask(transport, "llm", GREEDY, text_input="the quick").text() == greedy
        texts = [future.result().text() for future in asked]
    assert texts[2] == greedy
    assert len({*texts[:2], *texts[3:]}) == 1  # all of these mean: no limit


# Five tokens of these probabilities, and the rest of the vocabulary far behind.
SHARES = {"v": 0.4, "w": 0.3, "x": 0.2, "y": 0.07, "z": 0.03}
KNOWN = script(then="v").replace('"v"', str({k: 20 + math.log(p) for k, p in SHARES.items()}).replace("'", '"'))


@pytest.mark.server
@pytest.mark.parametrize(("top_p", "kept"), [(1e-6, "v"), (0.65, "vw"), (0.85, "vwx"), (1.0, "vwxyz")])
def test_i3_top_p_draws_are_valid_and_as_often_as_they_should_be(wire: Wire, top_p: float, kept: str) -> None:
    """Case I3: 1,024 draws over each of two transports against the known shares, renormalised over what is kept."""
    counts: Counter[str] = Counter()
    for seed, transport in enumerate(("grpc_single", "http_generate")):
        sampling = {"temperature": 1.0, "top_p": top_p, "n": 64, "max_tokens": 16, "seed": 1000 * seed}
        reply = wire.ask(transport, "scripted", sampling, text_input=KNOWN)
        for answer in range(64):
            counts.update(reply.text(answer))
    assert set(counts) == set(kept)
    total = sum(counts.values())
    assert total == 2 * 64 * 16
    expected = {token: total * SHARES[token] / sum(SHARES[k] for k in kept) for token in kept}
    chi_square = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in kept)
    assert chi_square < 18.5  # p = 0.001 at 4 degrees of freedom; the seeds are fixed


PENALISED = {"repetition_penalty": 1.5, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
test_ids_at_the_end = over_transports(
    [
        Case("i5_the_last_id", [5, VOCAB_SIZE - 1], PENALISED, model="llm", num_tokens=4),
        Case("i5_one_more", [5, VOCAB_SIZE], PENALISED, model="llm", error=f"token id {VOCAB_SIZE} in"),
        Case("i5_some_more", [VOCAB_SIZE + 5], PENALISED, model="llm", error=f"token id {VOCAB_SIZE + 5} in"),
        Case("i5_negative", [-1], PENALISED, model="llm", error="token id -1 in 'input_ids' is outside the vocabulary"),
        Case("i5_in_a_bias", "x", {"logit_bias": {"384": 1}}, model="llm", error="between 0 and 383, got 384"),
    ]
)

# "A" is at 10 and "B" at 9.5 in each step; given as ids, so that the prompt does not hold them.
RIVALS = {str(ord("A")): 10.0, str(ord("B")): 9.5}
WITHOUT = script(*[RIVALS] * 6)
WITH_A = script(*[RIVALS] * 6, pad="A")
SIX = {"max_tokens": 6}
test_penalties = over_transports(
    [
        Case("j4_none", WITHOUT, SIX, text="AAAAAA"),
        Case("j4_frequency_1", WITHOUT, {**SIX, "frequency_penalty": 1}, text="ABABAB"),
        Case("j4_frequency_2_is_of_the_output", WITH_A, {**SIX, "frequency_penalty": 2}, text="ABABAB"),
        Case("j4_frequency_minus_2", WITHOUT, {**SIX, "frequency_penalty": -2}, text="AAAAAA"),
        Case("j4_presence_1_is_of_the_output", WITH_A, {**SIX, "presence_penalty": 1}, text="ABAAAA"),
        Case("j4_repetition_2", WITHOUT, {**SIX, "repetition_penalty": 2}, text="ABAAAA"),
        Case("j4_repetition_2_is_of_the_prompt_too", WITH_A, {**SIX, "repetition_penalty": 2}, text="BAAAAA"),
        Case("j4_repetition_one_half", WITHOUT, {**SIX, "repetition_penalty": 0.5}, text="AAAAAA"),
        Case("j4_repetition_0", "x", {"repetition_penalty": 0}, error="repetition_penalty must be at least 0.01"),
        Case("j4_repetition_minus_1", "x", {"repetition_penalty": -1}, error="repetition_penalty must be between 0"),
        Case("j4_frequency_3", "x", {"frequency_penalty": 3}, error="frequency_penalty must be between -2 and 2"),
    ]
)


@pytest.mark.server
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_j1_cold_warm_and_half_warm_prompts(wire: Wire, floor: Floor, transport: str) -> None:
    """Case J1: the penalty counts the whole prompt, however much of it was found in the cache."""
    sampling = {**GREEDY, "repetition_penalty": 1.3}
    prompt = [1 + TRANSPORTS.index(transport), *range(100, 100 + 3 * BLOCK_SIZE)]
    cached = floor.metric("llm", "cb_cached_prompt_tokens_total")
    cold, warm = (wire.ask(transport, "llm", sampling, input_ids=prompt).output_ids() for _ in range(2))
    assert cold == warm
    half = [*prompt[: BLOCK_SIZE + 3], *range(200, 200 + BLOCK_SIZE)]
    half_warm = wire.ask(transport, "llm", sampling, input_ids=half).output_ids()
    alone = wire.ask(transport, "llm", {**sampling, "cache_salt": transport}, input_ids=half).output_ids()
    assert half_warm == alone
    eventually(lambda: floor.metric("llm", "cb_cached_prompt_tokens_total") >= cached + 4 * BLOCK_SIZE, "hits")


@pytest.mark.server
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_j3_one_of_eight_with_penalties(wire: Wire, transport: str) -> None:
    """Case J3: the batch changes nearly every step, the others answer what they answer alone."""
    penalised = {"presence_penalty": 1.5, "frequency_penalty": 1, "repetition_penalty": 1.2}
    requests = [(f"fox {i}", {**GREEDY, "max_tokens": 3 + 2 * i, **(penalised if i == 5 else {})}) for i in range(8)]
    alone = [wire.ask(transport, "llm", sampling, text_input=text).output_ids() for text, sampling in requests]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(wire.ask, transport, "llm", sampling, text_input=text) for text, sampling in requests]
        assert [future.result().output_ids() for future in asked] == alone


LONDON = {" London": 40.0, "London": 39.0, "x": 20.0}
test_no_choice = over_transports(
    [
        Case(
            "c2_nothing_but_eos_is_allowed",
            "the",
            {"allowed_token_ids": [0], "min_tokens": 1},
            model="llm",
            error="allowed_token_ids leaves only tokens that end the answer",
        ),
        Case("c2_eos_alone_at_once", "the", {"allowed_token_ids": [0]}, model="llm", text="", num_tokens=1),
    ]
)

test_bad_words = over_transports(
    [
        Case("k1_the_favourite", script(LONDON, "!"), text=" London!"),
        Case("k1_banned_in_both_forms", script(LONDON, LONDON, "!"), {"bad_words": ["London"]}, text="xx!"),
        Case("k1_with_a_space_means_the_same", script(LONDON, "!"), {"bad_words": " London"}, text="x!"),
        Case("k3_the_first_word_is_allowed", script("New", " Delhi"), {"bad_words": ["New York"]}, text="New Delhi"),
        Case(
            "k3_the_second_only_after_the_first",
            script(" York", "New", {" York": 40.0, " Delhi": 30.0}),
            {"bad_words": ["New York"]},
            text=" YorkNew Delhi",
        ),
    ]
)

test_unknown_names = over_transports(
    [
        Case(f"k4_{name}", "x", {name: 1}, error=f"unknown sampling parameter '{name}'")
        for name in ("temperatur", "max_new_tokens", "stop_words", "repeat_penalty", "beam_width", "stream")
    ]
)


@pytest.mark.server
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_k3_rules_that_leave_no_token_say_so(wire: Wire, transport: str) -> None:
    """A word of the only token that is allowed, twice: after the first none is left, and the request is to blame."""
    sampling = {**GREEDY, "allowed_token_ids": [ord("x")], "bad_words": ["xx"]}
    reply = wire.ask(transport, "scripted", sampling, text_input=script(then="x"))
    assert reply.num_finals == 1
    assert reply.error is not None
    assert "no token is left that all of the request's rules allow" in reply.error
    assert_clean(reply.error)
    assert "".join(text for response in reply.responses for text in response["text_output"]) in ("", "x")
