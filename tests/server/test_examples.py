"""The examples of model_repository/ on a real server, around a tiny `llm`: pytest tests/server/test_examples.py"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from tests.server.conftest import MAX_NUM_SEQS, RunningServer, running_server
from tests.server.example_calls import Call, _input, add_examples, joined
from tests.server.tiny_checkpoint import EOS, Reference
from tests.waiting import WAIT_S, eventually

pytestmark = pytest.mark.server
SYSTEM = "You answer in plain words, in a few sentences."  # chat_prompt/config.pbtxt


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(checkpoint, tmp_path_factory.mktemp("examples"), front_ends=1, prepare=add_examples) as running:
        yield running


def rendered(*messages: tuple[str, str]) -> str:
    """As the tiny checkpoint's chat template has it."""
    return "".join(f"{role}: {content}{EOS}" for role, content in messages) + "assistant:"


# ---- chat: an ensemble ---------------------------------------------------------------------------------------------


PIECES = [
    ("chat", {"question": "the fox?", "stream": True}),
    ("assistant", {"question": "the fox?", "stream": True}),
    ("tokens", {"text_input": "the quick", "max_tokens": np.array([60], dtype=np.int32), "stream": True}),
]


@pytest.mark.parametrize(("model", "inputs"), PIECES)
def test_answers_come_in_pieces(server: RunningServer, model: str, inputs: dict[str, Any]) -> None:
    """Not those of a sender that did not run meanwhile."""
    eventually(lambda: len(Call(server, model, **inputs).all()) > 3, "an answer comes in more than three pieces")


@pytest.mark.parametrize("is_stream", [False, True])
def test_chat_renders_messages_and_streams(server: RunningServer, reference: Reference, is_stream: bool) -> None:
    responses = Call(server, "chat", question="the fox?", stream=is_stream).all()
    assert is_stream or len(responses) == 1
    expected = reference.greedy_text(rendered(("system", SYSTEM), ("user", "the fox?")), 128)
    assert joined(responses) == expected


def test_chat_without_the_optional_inputs(server: RunningServer, reference: Reference) -> None:
    status, text = server.post("/v2/models/chat/generate", {"question": "the fox?"})
    assert status == 200, text
    prompt = rendered(("system", SYSTEM), ("user", "the fox?"))
    assert json.loads(text)["text_output"] == reference.greedy_text(prompt, 128)


def test_chat_remembers_what_was_said(server: RunningServer, reference: Reference) -> None:
    history = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    responses = Call(server, "chat", question="the fox?", history=json.dumps(history), stream=True).all()
    prompt = rendered(("system", SYSTEM), ("user", "hello"), ("assistant", "good day"), ("user", "the fox?"))
    assert joined(responses) == reference.greedy_text(prompt, 128)
    with pytest.raises(InferenceServerException, match="history must be a JSON list"):
        Call(server, "chat", question="the fox?", history="{", stream=True).all()


# ---- assistant: business logic -------------------------------------------------------------------------------------


def test_assistant_streams_on_and_adds_its_own(server: RunningServer, reference: Reference) -> None:
    seen = set()
    for word in ("fox", "dog", "wizards", "queen", "brew", "quick"):
        question = f"the {word}?"
        prompt = rendered(("user", question))
        expected = reference.greedy_text(prompt, 128)
        is_cut_off = expected != reference.greedy_text(prompt, 130)
        responses = Call(server, "assistant", question=question, stream=True).all()
        assert joined(responses) == expected + (" [cut off at the limit of tokens]" if is_cut_off else "")
        seen.add(is_cut_off)
    assert seen == {True, False}  # both kinds of end
    with pytest.raises(InferenceServerException, match="please ask with at least two words"):
        Call(server, "assistant", question="fox").all()


def test_assistant_answers_many_at_once(server: RunningServer, reference: Reference) -> None:
    words = ["fox", "dog", "wizards", "queen", "brew", "quick"]
    calls = [Call(server, "assistant", question=f"the {word}?", stream=True) for word in words]
    for word, call in zip(words, calls, strict=True):
        expected = reference.greedy_text(rendered(("user", f"the {word}?")), 128)
        assert joined(call.all()).startswith(expected), word


@pytest.mark.parametrize("inputs", [{}, {"stream": False}])
def test_h10_assistant_by_generate_is_one_response(
    server: RunningServer, reference: Reference, inputs: dict[str, bool]
) -> None:
    """The server's endpoint takes exactly one; more were an error after everything had been computed."""
    status, text = server.post("/v2/models/assistant/generate", {"question": "the fox?", **inputs})
    assert status == 200, text
    assert json.loads(text)["text_output"].startswith(reference.greedy_text(rendered(("user", "the fox?")), 128))
    assert len(Call(server, "assistant", question="the fox?", **inputs).all()) == 1


def test_h10_neighbours_tokens_by_generate_and_a_refusal(server: RunningServer, reference: Reference) -> None:
    status, text = server.post("/v2/models/tokens/generate", {"text_input": "東京は", "max_tokens": 60})
    assert status == 200, text
    answer = json.loads(text)
    assert answer["text_output"] == reference.greedy_text("東京は", 60)
    assert reference.tokenizer.decode(answer["token_ids"]) == answer["text_output"]
    status, text = server.post("/v2/models/assistant/generate", {"question": "fox"})
    assert (status, "please ask with at least two words" in text) == (400, True)


def test_a_client_that_gives_up_leaves_nothing_behind(server: RunningServer) -> None:
    for model in ("assistant", "chat"):
        call = Call(server, model, question="the wizards?", stream=True)
        call.next()
        call.close(cancel=True)
        server.wait_idle()


# ---- tokens: tokenise, generate by ids, detokenise ------------------------------------------------------------------


def test_tokens_streams_whole_characters(server: RunningServer, reference: Reference) -> None:
    """The tiny model's tokens are often single bytes of a character; joined, nothing is broken that need not be."""
    for prompt in ("the quick", "東京は", "🙂"):
        limit = np.array([60], dtype=np.int32)
        responses = Call(server, "tokens", text_input=prompt, max_tokens=limit, stream=True).all()
        assert joined(responses) == reference.greedy_text(prompt, 60)
        ids = [token_id for response in responses for token_id in response["token_ids"]]
        assert reference.tokenizer.decode(ids) == joined(responses)
    with pytest.raises(InferenceServerException, match="max_tokens must be between 1 and"):
        Call(server, "tokens", text_input="a", max_tokens=np.array([0], dtype=np.int32)).all()


# ---- triage: a small model beside the language model ---------------------------------------------------------------


@pytest.mark.parametrize(("text", "priority"), [("this is terrible and useless", -10), ("thanks, the fox", 0)])
def test_mood_is_a_logistic_regression(server: RunningServer, text: str, priority: int) -> None:
    with grpc.InferenceServerClient(server.url) as client:
        result = client.infer("mood", [_input("text_input", text, (1,))])
    weights = {"terrible": 2.5, "useless": 2.5, "thanks": -1.5}
    expected = 1 / (1 + math.exp(2.0 - sum(weight for word, weight in weights.items() if word in text)))
    assert result.as_numpy("upset")[0] == pytest.approx(expected, abs=1e-6)
    assert json.loads(result.as_numpy("sampling_parameters")[0])["priority"] == priority


def test_triage_answers(server: RunningServer, reference: Reference) -> None:
    text = "this is terrible"
    status, answer = server.post("/v2/models/triage/generate", {"text_input": text})
    assert (status, json.loads(answer)["text_output"]) == (200, text + reference.greedy_text(text, 64))


def is_waiting(server: RunningServer, count: int) -> bool:
    return server.gauge("nv_trt_llm_request_metrics", "waiting") == count


def test_triage_lets_the_upset_overtake(server: RunningServer) -> None:
    """With a full batch and a queue, what comes last and upset is answered, and what came earlier and calm waits on."""

    def blocker(priority: int) -> Call:
        long = {"max_tokens": 16_000, "temperature": 0, "ignore_eos": True, "priority": priority}
        return Call(server, "llm", text_input="fox", sampling_parameters=json.dumps(long), stream=True)

    blockers = [blocker(-10) for _ in range(MAX_NUM_SEQS)]
    for each in blockers:
        each.next()
    blockers.append(blocker(-5))  # before the calm ones, so that they find no place when the upset one has left its own
    eventually(partial(is_waiting, server, 1), "it waits")
    ends: list[str] = []

    def ask(text: str) -> None:
        Call(server, "triage", text_input=text).all()
        ends.append(text)

    threads = []
    for text in ("thanks one", "thanks two", "thanks three", "terrible and useless"):
        threads.append(threading.Thread(target=ask, args=(text,)))
        threads[-1].start()
        eventually(partial(is_waiting, server, 1 + len(threads)), "it waits")
    blockers[0].close(cancel=True)  # one place
    blockers[-1].next()
    eventually(lambda: bool(ends), "an answer")
    assert ends == ["terrible and useless"]
    for each in blockers[1:]:
        each.close(cancel=True)
    for thread in threads:
        thread.join(WAIT_S)
    assert len(ends) == len(threads)
    server.wait_idle()


# ---- llm_trtllm: another wire over the same engine ------------------------------------------------------------------

TWO = (1, 1)


def test_one_engine_serves_both_wires(server: RunningServer) -> None:
    assert len(server.engine_pids()) == 1


def numbers(**values: Any) -> dict[str, Any]:
    return {
        name: np.array([[value]], dtype=np.float32 if isinstance(value, float) else np.int32)
        for name, value in values.items()
    }


@pytest.mark.parametrize("is_stream", [False, True])
def test_trtllm_clients_get_their_tensors(server: RunningServer, reference: Reference, is_stream: bool) -> None:
    """What the OpenAI frontend and genai-perf send: rank-2 tensors."""
    counts = {"return_num_input_tokens": True, "return_num_output_tokens": True, "exclude_input_in_output": True}
    inputs = {"text_input": "the quick", "stream": is_stream, **counts, **numbers(max_tokens=20, min_length=20)}
    responses = Call(server, "llm_trtllm", TWO, **inputs).all()
    assert is_stream or len(responses) == 1
    assert {response["num_input_tokens"][0] for response in responses} == {reference.num_tokens("the quick")}
    assert sum(response["num_output_tokens"][0] for response in responses) == 20
    assert joined(responses) == reference.greedy_text("the quick", 20)
    assert {len(response["text_output"]) for response in responses} == {1}


def test_trtllm_words_and_generate(server: RunningServer, reference: Reference) -> None:
    whole = reference.greedy_text("the quick", 20)
    stop = whole[5:8]
    body = {"text_input": "the quick", "max_tokens": 20, "stop_words": [stop, ""], "bad_words": "", "beam_width": 1}
    status, text = server.post("/v2/models/llm_trtllm/generate", body)
    assert status == 200, text
    assert json.loads(text)["text_output"] == "the quick" + whole.partition(stop)[0]
    for name, value in (("beam_width", 2), ("return_log_probs", True), ("top-k", 3)):
        status, text = server.post("/v2/models/llm_trtllm/generate", {**body, name: value})
        assert status == 400
        assert name in text or "parameters as tensors" in text


def test_h02_trtllm_words_as_json_text(server: RunningServer, reference: Reference) -> None:
    whole = reference.greedy_text("the quick", 20)
    body = {"text_input": "the quick", "max_tokens": 20, "stop_words": json.dumps([whole[5:8], "\u2603"])}
    status, text = server.post("/v2/models/llm_trtllm/generate", body)
    assert status == 200, text
    assert json.loads(text)["text_output"] == "the quick" + whole.partition(whole[5:8])[0]


def test_r70b_a_bad_string_is_shown_as_text_over_http(server: RunningServer) -> None:
    body = {"text_input": "the quick", "embedding_bias_words": "Paris"}
    status, text = server.post("/v2/models/llm_trtllm/generate", body)
    assert status == 400
    assert "'embedding_bias_words' is not supported (got 'Paris')" in json.loads(text)["error"]


def test_cancelling_through_the_other_wire(server: RunningServer) -> None:
    call = Call(server, "llm_trtllm", TWO, text_input="the quick", stream=True, **numbers(max_tokens=9000, end_id=-1))
    call.next()
    eventually(lambda: server.num_active_requests() == 1, "it runs")
    call.close(cancel=True)
    server.wait_idle()


def test_both_wires_at_once(server: RunningServer, reference: Reference) -> None:
    texts: dict[str, str] = {}
    prompts = ("the quick", "seven wizards", "fox", "evil queen")

    def ask(prompt: str, is_trtllm: bool) -> None:
        if is_trtllm:
            call = Call(server, "llm_trtllm", TWO, text_input=prompt, stream=True, **numbers(max_tokens=30))
            texts[prompt] = joined(call.all())
        else:
            texts[prompt] = server.client.generate(prompt, max_tokens=30, temperature=0)

    threads = [threading.Thread(target=ask, args=(prompt, i % 2 == 0)) for i, prompt in enumerate(prompts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert texts == {prompt: reference.greedy_text(prompt, 30) for prompt in prompts}
