"""Several answers to one request (`n`) on a real server: what each is, and when all end.

pytest tests/server/test_n_answers.py
"""

from __future__ import annotations

import json
import re
import urllib.request

import pytest

from tests.server.conftest import RunningServer
from tests.server.raw_stream import RawStream
from tests.server.test_wire import DRAWN, ask, merged_logprobs
from tests.waiting import WAIT_S, eventually

pytestmark = pytest.mark.server


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_are_those_of_n_requests(server: RunningServer, stream: bool) -> None:
    """Answer i is what a request with seed + i gets; every output has an element an answer; the prompt counts once."""
    singles = [ask(server, "the quick", {**DRAWN, "seed": 50 + i, "logprobs": 1})[0] for i in range(3)]
    responses = ask(server, "the quick", {**DRAWN, "n": 3, "logprobs": 1}, stream)
    assert stream or len(responses) == 1
    for index, single in enumerate(singles):
        assert "".join(response["text_output"][index] for response in responses) == single["text_output"][0]
        figures = merged_logprobs(responses, index)
        expected = json.loads(single["logprobs"][0])
        assert [list(entry) for entry in figures] == [list(entry) for entry in expected]
        assert responses[-1]["cumulative_logprob"][index] == pytest.approx(single["cumulative_logprob"][0], abs=1e-3)
        assert sum(response["num_output_tokens"][index] for response in responses) == 20
    assert len({single["text_output"][0] for single in singles}) == 3
    for response in responses:
        assert response["num_input_tokens"] == singles[0]["num_input_tokens"]  # L4: once
        assert {len(response[name]) for name in ("text_output", "finish_reason", "logprobs", "num_output_tokens")} == {
            3
        }
    assert responses[-1]["finish_reason"] == ["length"] * 3
    server.wait_idle()


def test_l3_the_final_response_waits_for_the_last_answer(server: RunningServer) -> None:
    """Case L3 for n: answers end at different tokens, by stop strings too."""
    singles = [ask(server, "fox", {**DRAWN, "seed": 50 + i})[0]["text_output"][0] for i in range(4)]
    stop = singles[1][:2]
    for stream in (False, True):
        responses = ask(server, "fox", {**DRAWN, "n": 4, "stop": stop}, stream)
        texts = ["".join(response["text_output"][i] for response in responses) for i in range(4)]
        assert texts == [single.partition(stop)[0] for single in singles]
        reasons = ["stop" if stop in single else "length" for single in singles]
        assert responses[-1]["finish_reason"] == reasons
        assert reasons[1] == "stop"
        for response in responses[:-1]:
            assert "None" in response["finish_reason"]
    server.wait_idle()


def test_l1_cancelling_ends_all_answers(server: RunningServer) -> None:
    """Case L1: all blocks are free soon after."""
    stream = RawStream(server.url, "the quick", {**DRAWN, "n": 4, "max_tokens": 10000})
    stream.wait(num_texts=3)
    eventually(lambda: (server.num_active_requests() or 0) == 4, "four answers run")
    stream.close(cancel=True)
    server.wait_idle()


def test_l4_the_prompt_is_shared(server: RunningServer) -> None:
    """Case L4: the answers after the first find the prompt's full blocks in the cache."""
    prompt = "seven wizards make toxic brew " * 12
    before = num_cached_tokens(server)
    (response,) = ask(server, prompt, {**DRAWN, "n": 4})
    num_prompt = response["num_input_tokens"][0]
    least, most = 3 * (num_prompt - 16), 3 * num_prompt
    assert least > 0
    eventually(lambda: num_cached_tokens(server) - before >= least, f"{least} tokens from the cache")
    server.wait_idle()
    assert num_cached_tokens(server) - before <= most


def num_cached_tokens(server: RunningServer) -> float:
    with urllib.request.urlopen(f"http://{server.process.metrics_address}/metrics", timeout=WAIT_S) as response:
        text = response.read().decode()
    values = re.findall(r"^cb_cached_prompt_tokens_total{[^}]*} (\S+)$", text, re.MULTILINE)
    return sum(map(float, values))
