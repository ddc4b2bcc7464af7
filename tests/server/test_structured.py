"""Structured output over the wire of a real server: pytest tests/server/test_structured.py"""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from tests.engine.structured import LIST, PERSON, SQL, is_person
from tests.server.conftest import RunningServer
from tests.server.raw_stream import RawStream
from tests.server.test_wire import answer, ask
from tests.waiting import WAIT_S

pytestmark = pytest.mark.server

DRAWN = {"max_tokens": 300, "temperature": 1.0, "seed": 5}


@pytest.mark.parametrize("stream", [True, False])
def test_a_schema_over_grpc(server: RunningServer, stream: bool) -> None:
    """As vllm_backend's clients write it: JSON text inside the JSON. Ends with stop, and counts its tokens."""
    sampling = {**DRAWN, "structured_outputs": json.dumps({"json": PERSON})}
    responses = ask(server, "A person:", sampling, stream=stream)
    text = "".join(response["text_output"][0] for response in responses)
    assert is_person(json.loads(text))
    assert responses[-1]["finish_reason"] == ["stop"]
    assert stream or len(responses) == 1
    assert sum(response["num_output_tokens"][0] for response in responses) <= 300


def test_a_schema_over_http(server: RunningServer) -> None:
    sampling = json.dumps({**DRAWN, "guided_json": PERSON})
    body = {"text_input": "A person:", "sampling_parameters": sampling, "exclude_input_in_output": True}
    status, text = server.post("/v2/models/llm/generate", body)
    assert status == 200
    assert is_person(json.loads(json.loads(text)["text_output"]))
    status, stream = server.post("/v2/models/llm/generate_stream", {**body, "stream": True})
    pieces = [json.loads(line.removeprefix("data: "))["text_output"] for line in stream.splitlines() if line]
    assert status == 200
    assert "".join(pieces) == json.loads(text)["text_output"]
    # Request parameters instead of the tensor: text is all they can carry.
    parameters = {"guided_choice": json.dumps(["left", "right"]), "max_tokens": 20}
    status, text = server.post("/v2/models/llm/generate", {"text_input": "Go ", **parameters})
    assert status == 200
    assert json.loads(text)["text_output"] in ("Go left", "Go right")


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ({"guided_regex": r"[a-c]{2}\d{3}"}, r"[a-c]{2}[0-9]{3}"),
        ({"guided_choice": ["positive", "negative", "né"]}, "positive|negative|né"),
        ({"guided_grammar": SQL}, r"SELECT ([a-c]+|\*)(,([a-c]+|\*))? FROM t"),
        ({"structured_outputs": {"grammar": LIST}}, r"[0-9]{1,2}(,[0-9]{1,2}){0,3}"),
        ({"guided_decoding": {"json_object": True}}, r"\{(.|\n)*"),
    ],
)
def test_every_other_kind(server: RunningServer, grammar: dict[str, Any], pattern: str) -> None:
    text = answer(server, "Classify: ", {**DRAWN, "max_tokens": 60, **grammar})
    assert re.fullmatch(pattern, text), text


def test_n_answers_follow_the_grammar_each(server: RunningServer) -> None:
    sampling = {**DRAWN, "n": 4, "guided_regex": "[a-z]{3}[0-9]{3}"}
    (final,) = ask(server, "Four ids:", sampling)
    assert len(final["text_output"]) == 4
    assert all(re.fullmatch("[a-z]{3}[0-9]{3}", text) for text in final["text_output"])
    assert len({*final["text_output"]}) > 1


def test_w1_bad_grammars_are_refused_and_running_streams_go_on(server: RunningServer) -> None:
    """Case W1: each with its reason, before it is queued; a stream beside them brings every token."""
    bad = ["foo**(", "(", "(a{1000}){1000}", "x{1000000}{1000000}", "(?=a)b", "[", "a{2,1}", "(" * 300]
    out: list[list[dict[str, Any]]] = []
    beside = threading.Thread(
        target=lambda: out.append(ask(server, "On and on", {"max_tokens": 200, "ignore_eos": True}, stream=True))
    )
    beside.start()
    for regex in bad:
        with pytest.raises(InferenceServerException, match="structured output: the regex cannot be used"):
            ask(server, "x", {"guided_regex": regex})
    status, text = server.post("/v2/models/llm/generate", {"text_input": "x", "guided_regex": "foo**("})
    assert status == 400
    assert "unclosed group" in text
    with pytest.raises(InferenceServerException, match="JSON schema cannot be used: Unimplemented keys"):
        ask(server, "x", {"guided_json": {"not": {}}})
    with pytest.raises(InferenceServerException, match="asked for by guided_regex and guided_choice; send one"):
        ask(server, "x", {"guided_regex": "a", "guided_choice": ["a"]})
    beside.join(timeout=WAIT_S)
    assert sum(response["num_output_tokens"][0] for response in out[0]) == 200
    server.wait_idle()


def test_cancelled_in_the_middle_of_a_grammar(server: RunningServer) -> None:
    sampling = {"max_tokens": 4000, "guided_regex": "[a-z]{3000}"}
    for _ in range(3):
        stream = RawStream(server.url, "x", sampling)
        stream.wait(num_texts=3)
        stream.close(cancel=True)
    server.wait_idle()
    assert re.fullmatch("[a-z]{5}", answer(server, "x", {**DRAWN, "guided_regex": "[a-z]{5}"}))
