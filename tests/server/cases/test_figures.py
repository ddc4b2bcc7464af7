"""Kinds F, G and H, figures of tokens: log-probabilities, seeds, temperatures, broken numbers."""

from __future__ import annotations

import itertools
import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.fakes.scripted_model import script
from tests.server.cases.case import Case, over_transports
from tests.server.cases.conftest import BLOCK_SIZE, Floor
from tests.server.cases.transports import TRANSPORTS, Reply, Wire
from tests.waiting import eventually

GREEDY = {"temperature": 0, "ignore_eos": True}
SEEDED = {"temperature": 0.8, "seed": 42, "max_tokens": 16, "ignore_eos": True}


def entries_of(num_figures: int) -> object:
    def check(reply: Reply) -> None:
        assert [len(entry) for entry in reply.logprobs()] == [num_figures] * reply.num_tokens()

    return check


def texts_are_the_text(reply: Reply) -> None:
    texts = [next(iter(entry.values()))["decoded_token"] for entry in reply.logprobs()]
    assert "".join(texts) == reply.text() == "a bDEF stop"


def one_rank_for_equals(reply: Reply) -> None:
    assert reply.output_ids()[:3] == [ord("x")] * 3
    for entry in reply.logprobs()[:3]:
        assert list(entry) == [str(ord("x")), str(ord("y")), str(ord("a"))]
        assert [figure["rank"] for figure in entry.values()] == [1, 1, 3]


TIED = {"y": 30.0, "x": 30.0, "a": 20.0}
test_logprobs = over_transports(
    [
        Case("f6_zero_is_the_chosen_token", script("a", "b"), {"logprobs": 0}, check=entries_of(1)),
        Case("f6_one", script("a", "b"), {"logprobs": 1}, check=entries_of(1)),
        Case("f6_the_most", script("a", "b"), {"logprobs": 20}, check=entries_of(20)),
        Case("f6_as_a_string", script("a", "b"), {"logprobs": "3"}, check=entries_of(3)),
        Case("f6_above_the_most", "x", {"logprobs": 21}, error="logprobs must be between 0 and 20, got 21"),
        Case("f6_negative", "x", {"logprobs": -1}, error="logprobs must be between 0 and 20, got -1"),
        Case("f8_above_the_vocabulary", "x", {"logprobs": 385}, model="llm", error="logprobs must be between 0 and 20"),
        Case("f9_equal_logits", script(TIED, TIED, TIED), {"logprobs": 3}, check=one_rank_for_equals),
        Case("f5_texts", script("a b", "DEF", " stop"), {"logprobs": 1, "max_tokens": 3}, check=texts_are_the_text),
    ]
)


@pytest.mark.server
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_f1_prompt_logprobs_of_a_cached_prompt(wire: Wire, transport: str) -> None:
    """Case F1: 117 tokens twice; the list is complete both times, its first entry empty."""
    prompt = [10 + TRANSPORTS.index(transport), *range(100, 216)]
    sampling = {**GREEDY, "max_tokens": 2, "prompt_logprobs": 1}
    told = []
    for _ in range(2):
        reply = wire.ask(transport, "llm", sampling, input_ids=prompt)
        assert reply.error is None
        told.append(json.loads(reply.responses[0]["prompt_logprobs"][0]))
        assert [entry is None for entry in told[-1]] == [True] + [False] * 116
        assert [next(iter(entry)) for entry in told[-1][1:]] == [str(token) for token in prompt[1:]]
    for first, second in zip(told[0][1:], told[1][1:], strict=True):
        assert {key: figure["logprob"] for key, figure in second.items()} == pytest.approx(
            {key: figure["logprob"] for key, figure in first.items()}, abs=1e-3
        )


@pytest.mark.server
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_f3_warm_prompts_around_block_borders(wire: Wire, floor: Floor, transport: str) -> None:
    """Case F3: the second time the prompt comes from the cache; the figures are those of the first."""
    sampling = {**GREEDY, "max_tokens": 3, "logprobs": 2}
    cached = floor.metric("llm", "cb_cached_prompt_tokens_total")
    for length in (BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 1):
        prompt = [1 + TRANSPORTS.index(transport), length, *range(3, length + 1)]
        cold, warm = (wire.ask(transport, "llm", sampling, input_ids=prompt) for _ in range(2))
        assert (cold.error, warm.error) == (None, None)
        assert len(cold.logprobs()) == 3
        assert figures(warm) == pytest.approx(figures(cold), abs=1e-3)
    eventually(lambda: floor.metric("llm", "cb_cached_prompt_tokens_total") > cached, "blocks were found")


def figures(reply: Reply) -> dict[tuple[int, str], float]:
    return {(i, key): entry[key]["logprob"] for i, entry in enumerate(reply.logprobs()) for key in entry}


@pytest.mark.server
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_f8_seven_neighbours_do_not_notice(wire: Wire, transport: str) -> None:
    def ask(num_logprobs: int) -> Reply:
        return wire.ask(transport, "llm", {**GREEDY, "max_tokens": 8, "logprobs": num_logprobs}, text_input="the fox")

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(ask, [5] * 4 + [385] + [5] * 3))
    assert [reply.error is None for reply in replies] == [True] * 4 + [False] + [True] * 3
    assert len({reply.text() for reply in replies if reply.error is None}) == 1


@pytest.mark.server
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_g1_neighbours_do_not_change_a_seeded_sample(wire: Wire, transport: str) -> None:
    alone = wire.ask(transport, "llm", SEEDED, text_input="the quick").text()
    unseeded = {**SEEDED, "seed": None}
    for num_neighbours in (1, 7, 15):
        with ThreadPoolExecutor(16) as pool:
            asked = [
                pool.submit(wire.ask, transport, "llm", unseeded, text_input="a fox") for _ in range(num_neighbours)
            ]
            assert wire.ask(transport, "llm", SEEDED, text_input="the quick").text() == alone
            assert all(future.result().error is None for future in asked)


@pytest.mark.server
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_g3_equal_seeds_at_once(wire: Wire, transport: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda text: wire.ask(transport, "llm", SEEDED, text_input=text), ["def add"] * 2)
    assert first.text() == second.text()


@pytest.mark.server
def test_g3_equal_seeds_and_one_preempted(wire: Wire, floor: Floor) -> None:
    """Case G3: a more urgent request takes the slot of one of two in the middle of its text."""
    sampling = {**SEEDED, "max_tokens": 800}  # seconds, in which the urgent one must arrive
    preemptions = floor.metric("llm", "cb_preemptions_total")
    priorities = [50, *[0] * 15]  # the batch is full
    inputs = [wire.inputs("grpc_stream", {**sampling, "priority": p}, {"text_input": "def add"}) for p in priorities]
    calls = [wire.start("llm", each) for each in inputs]
    begun = [next(call) for call in calls]
    assert wire.ask("grpc_stream", "llm", {**SEEDED, "priority": -50}, text_input="now").error is None
    replies = [wire.collect(itertools.chain([message], call)) for message, call in zip(begun, calls, strict=True)]
    assert len({reply.text() for reply in replies}) == 1
    eventually(lambda: floor.metric("llm", "cb_preemptions_total") > preemptions, "a preemption")


@pytest.mark.server
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_h1_tiny_temperatures_are_greedy(wire: Wire, transport: str) -> None:
    greedy = wire.ask(transport, "llm", {**GREEDY, "max_tokens": 12}, text_input="the quick").text()
    for temperature in (1e-4, 1e-6, 1e-30, 1e-45):
        sampling = {**GREEDY, "max_tokens": 12, "temperature": temperature}
        assert wire.ask(transport, "llm", sampling, text_input="the quick").text() == greedy
    # At 1e-3 a logit that is 0.02 behind is still e^20 times less likely.
    assert (
        wire.ask(transport, "scripted", {"temperature": 1e-3}, text_input=script({"x": 5.0, "y": 4.98})).text() == "x"
    )


def numbers() -> list[Case]:
    """Case H3. JSON has no NaN; Python writes it, so it is met."""
    bad: list[tuple[str, Any]] = [
        ("temperature", 999999), ("temperature", math.nan), ("temperature", math.inf), ("temperature", True),
        ("temperature", "warm"), ("top_p", -1), ("top_p", math.nan), ("min_p", 2), ("repetition_penalty", 0),
        ("presence_penalty", -math.inf), ("temperature", "1e999"),
    ]  # fmt: skip
    good: list[tuple[str, Any]] = [("temperature", -0.0), ("temperature", "0.7"), ("temperature", 2), ("top_p", "1.0")]
    sampling = {"max_tokens": 2, "ignore_eos": True}
    return [Case(f"h3_{name}_{value}", "the", {name: value}, model="llm", error=name) for name, value in bad] + [
        Case(f"h3_{name}_{value}", "the", {**sampling, name: value}, model="llm", num_tokens=2) for name, value in good
    ]


test_numbers = over_transports(numbers())


@pytest.mark.server
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_h4_a_row_of_nan_ends_one_request(wire: Wire, floor: Floor, transport: str) -> None:
    failed = floor.metric("scripted", "cb_requests_total", outcome="internal")
    steps = ["a", "b", "c", "d"]
    prompts = [script(*steps, "e", pad="p" * 64), script(*steps, None, pad="p" * 64)] * 2
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda prompt: wire.ask(transport, "scripted", GREEDY, text_input=prompt), prompts))
    for good, bad in (replies[:2], replies[2:]):
        assert good.error is None
        assert good.text().startswith("abcde")
        Case("h4", error="the engine could not compute this request").verify(Reply([], bad.error, bad.num_finals))
    again = wire.ask(transport, "scripted", GREEDY, text_input=prompts[1])
    assert again.error == replies[1].error  # nothing of it was kept
    eventually(
        lambda: floor.metric("scripted", "cb_requests_total", outcome="internal") == failed + 3, "all are counted"
    )
    floor.wait_idle("scripted")


WRONG = [([1], "list"), ({"a": 1}, "object"), ("x", "text")]
NAMES = (
    "max_tokens", "min_tokens", "top_k", "seed", "temperature", "top_p", "min_p", "ignore_eos", "n", "logprobs",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "include_stop_str_in_output",
)  # fmt: skip
test_wrong_types = over_transports(
    [Case(f"h6_{name}_{kind}", "x", {name: value}, error=name) for name in NAMES for value, kind in WRONG]
)
