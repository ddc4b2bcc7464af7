"""Kinds L and X, several answers to one request, and limits that hold before anything is done."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fakes.scripted_model import script
from tests.server.cases.case import Case, over_transports
from tests.server.cases.conftest import BLOCK_SIZE, Floor
from tests.server.cases.test_ends import hash_output
from tests.server.cases.transports import TRANSPORTS, Reply, Wire
from tests.waiting import eventually

FOUR = {"n": 4, "temperature": 1.0, "seed": 3}


@pytest.mark.server
@pytest.mark.parametrize("transport", ["grpc_stream", "grpc_single"])
def test_l1_cancelling_ends_all_answers(wire: Wire, floor: Floor, transport: str) -> None:
    """Case L1. (Over HTTP the server tells of a lost client only at its next response: see `test_cancel`.)"""
    inputs = wire.inputs(transport, {**FOUR, "max_tokens": 3000}, {"input_ids": [1, 2, 3]})
    call = wire.start("hash", inputs)
    if transport == "grpc_stream":
        for _ in range(3):
            next(call)
    eventually(lambda: floor.num_active("hash") == 4, "four answers run")
    call.cancel()
    floor.wait_idle("hash")


@pytest.mark.server
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_l3_the_final_response_waits_for_the_last_answer(wire: Wire, transport: str) -> None:
    """Case L3: one of the answers ends at its first token, others later; each keeps its own end."""
    prompt = script({"</s>": 20.0, "x": 20.0}, {"</s>": 20.0, "y": 20.0}, "z")
    reply = wire.ask(transport, "scripted", {**FOUR, "n": 16}, text_input=prompt)
    assert (reply.error, reply.num_finals) == (None, 1)
    assert {reply.text(answer) for answer in range(16)} == {"", "x", "xyz"}
    for answer in range(16):
        assert reply.last("finish_reason", answer) == "stop"
        assert reply.num_tokens(answer) == {"": 1, "x": 2, "xyz": 4}[reply.text(answer)]
    for response in reply.responses[:-1]:
        assert "None" in response["finish_reason"]


@pytest.mark.server
@pytest.mark.parametrize("transport", ["grpc_single", "http_generate"])
def test_l3_the_best_of_four_can_be_chosen(wire: Wire, transport: str) -> None:
    """Case L3: of answers that end at once and later ones, each has its own cumulative log-probability."""
    # So likely beside all other tokens that no answers of different texts have one log-probability.
    prompt = script({"</s>": 20.0, "x": 21.0, "w": 19.0}, "y")
    singles = [wire.ask(transport, "scripted", {**FOUR, "n": 1, "seed": 3 + i}, text_input=prompt) for i in range(4)]
    reply = wire.ask(transport, "scripted", FOUR, text_input=prompt)
    assert [reply.last("cumulative_logprob", i) for i in range(4)] == pytest.approx(
        [single.last("cumulative_logprob") for single in singles], abs=1e-4
    )
    assert [reply.text(i) for i in range(4)] == [single.text() for single in singles]


@pytest.mark.server
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_l4_the_prompt_counts_once_and_is_cached_for_the_others(wire: Wire, floor: Floor, transport: str) -> None:
    prompt = [200 + TRANSPORTS.index(transport), *range(4 * BLOCK_SIZE)]
    floor.wait_idle("hash")
    before = floor.metric("hash", "cb_cached_prompt_tokens_total")
    reply = wire.ask(transport, "hash", {**FOUR, "max_tokens": 2}, input_ids=prompt)
    assert reply.responses[0]["num_input_tokens"] == [len(prompt)]
    assert reply.last("num_output_tokens", 3) >= 1
    ids = [reply.num_tokens(answer) for answer in range(4)]
    assert ids == [2] * 4
    if not transport.endswith("stream"):
        assert reply.output_ids() == hash_output(prompt, 2) * 4
    least, most = 3 * 4 * BLOCK_SIZE, 3 * len(prompt)

    def cached() -> float:
        return floor.metric("hash", "cb_cached_prompt_tokens_total") - before

    eventually(lambda: least <= cached() <= most, f"{least} to {most} tokens of the other answers' prompts")


test_limits = over_transports(
    [
        Case("x1_a_million_answers", "x", {"n": 10**6, "temperature": 1}, error="n must be between 1 and 64"),
        Case("x1_best_of", "x", {"best_of": 10**9, "temperature": 1}, error="best_of is not supported"),
        Case("x3_priority", "x", {"priority": 2**64, "n": 2, "temperature": 1}, error="priority must be between -100"),
        Case("x3_priority_high", "x", {"priority": "high"}, error="priority must be an integer, got 'high'"),
        Case("x5_bad_json", "x", '{"max_tokens": ', error="not valid JSON"),
        Case("x5_no_object", "x", "[1]", error="must be a JSON object, got a list of 1 entries"),
    ]
)


@pytest.mark.server
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_x3_nothing_stays_registered(wire: Wire, floor: Floor, transport: str) -> None:
    """Case X3: requests that fail on their way in, some with several answers, leave the gauges at zero."""
    bad = [{**FOUR, "priority": 2**64}, {**FOUR, "bad_words": [" "]}, {**FOUR, "logit_bias": {"999999": 1}}] * 4
    for sampling in bad:
        assert wire.ask(transport, "hash", sampling, input_ids=[1]).error is not None
    floor.wait_idle("hash")
    assert floor.num_waiting("hash") == 0


@pytest.mark.server
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_x5_one_bad_and_seven_good_at_once(wire: Wire, transport: str) -> None:
    def ask(index: int) -> Reply:
        sampling = "{" if index == 3 else json.dumps({"max_tokens": 8})
        return wire.ask(transport, "hash", sampling, input_ids=[index, 7])

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(ask, range(8)))
    assert [reply.num_finals for reply in replies] == [1] * 8
    assert "not valid JSON" in (replies[3].error or "")
    for index in {*range(8)} - {3}:
        assert replies[index].output_ids() == hash_output([index, 7], 8)
