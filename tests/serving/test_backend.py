"""The model class as the server drives it, with a real engine process that counts instead of thinking."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from cb_backend.contracts.errors import CbError, ConfigError
from tests.front_end.engines import is_running
from tests.serving.driven_model import LONG, ask, folder, make_repository, model, num_in_engine, server_args
from tests.serving.fake_server import InferenceRequest, Metric, MetricFamily, TritonError, TritonModelException
from tests.waiting import eventually

__all__ = ["folder", "model"]  # fixtures


def test_streamed_answer(model: Any) -> None:
    flags = dict.fromkeys(("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"), True)
    sender = ask(model, "xa", sampling={"max_tokens": 6}, **flags).sender.wait()
    assert sender.text == "bcdefg"
    assert sender.final_count == 1
    reasons = sender.outputs("finish_reason")
    assert reasons == [b"None"] * (len(reasons) - 1) + [b"length"]
    assert sum(sender.outputs("num_output_tokens")) == 6
    assert set(sender.outputs("num_input_tokens")) == {2}
    assert str(sender.responses[0].tensors["num_input_tokens"].dtype) == "uint32"


def test_whole_answer_begins_with_the_prompt_unless_excluded(model: Any) -> None:
    sender = ask(model, "xa", stream=False, sampling={"max_tokens": 3}).sender.wait()
    assert [sender.text, len(sender.responses)] == ["xabcd", 1]
    assert set(sender.responses[0].tensors) == {"text_output"}
    sender = ask(model, "xa", stream=False, sampling={"max_tokens": 3}, exclude_input_in_output=True).sender.wait()
    assert sender.text == "bcd"


def test_request_parameters_are_sampling_parameters(model: Any) -> None:
    request = InferenceRequest({"text_input": "a", "stream": True}, {"max_tokens": 2})
    model.execute([request])
    assert request.sender.wait().text == "bc"


def test_request_parameters_that_are_no_text(model: Any) -> None:
    """The server passes on what HTTP clients send; its own JSON of it cannot be decoded then."""

    class BrokenRequest(InferenceRequest):
        def parameters(self) -> str:
            return b'{"max_t\xbdkens": 2}'.decode()

    request = BrokenRequest({"text_input": "a"})
    model.execute([request])
    code, message = request.sender.wait().error or (None, "")
    assert code == TritonError.INVALID_ARG
    assert "not valid UTF-8" in message


def test_h16_a_prompts_tokens_need_no_engine_and_are_in_no_figure(model: Any) -> None:
    before = model._responder.counts()
    sender = ask(model, "xa</s>", stream=False, tokenize='{"return_token_strs": true}').sender.wait()
    assert [sender.text, len(sender.responses), sender.final_count] == ["xa</s>", 1, 1]
    told = json.loads(sender.responses[0].tensors["tokenized"][0])
    assert told["tokens"] == [120, 97, 259]
    assert told["token_strs"] == ["x", "a", "</s>"]
    grown = {name: count - before[name] for name, count in model._responder.counts().items() if count != before[name]}
    assert grown == {"responses": 1}
    assert num_in_engine(model) == 0
    code, message = ask(model, "xa", tokenize="no JSON").sender.wait().error or (None, "")
    assert code == TritonError.INVALID_ARG
    assert "input 'tokenize' must be a JSON object of options" in message


def test_one_bad_request_among_seven_good_ones(model: Any) -> None:
    good = [InferenceRequest({"text_input": chr(97 + i), "sampling_parameters": '{"max_tokens": 2}'}) for i in range(7)]
    bad = InferenceRequest({"text_input": "a", "sampling_parameters": "{max_tokens: 2"})
    model.execute([*good[:3], bad, *good[3:]])
    for index, request in enumerate(good):
        assert request.sender.wait().text == "".join(chr(97 + index + i) for i in range(3))
    code, message = bad.sender.wait().error or (None, "")
    assert code == TritonError.INVALID_ARG
    assert "JSON" in message


@pytest.mark.parametrize(
    ("text", "sampling", "inputs", "reason"),
    [
        ("a", {"max_tokens": -1}, {}, "max_tokens must be between"),
        ("a", {"no_such_parameter": 1}, {}, "no_such_parameter"),
        ("a", {}, {"exclude_input_in_output": False}, "When streaming, `exclude_input_in_output` = False"),
        ("a", {}, {"image": b"aGk="}, "image"),
        ("a" * 5000, {}, {}, "5000 tokens"),
        ("a" * 4096, {}, {}, "at most 4095 fit"),
        ("", {}, {}, "empty"),
    ],
)
def test_bad_requests_get_the_reason(
    model: Any, text: str, sampling: dict[str, Any], inputs: dict[str, Any], reason: str
) -> None:
    sender = ask(model, text, sampling=sampling, **inputs).sender.wait()
    code, message = sender.error or (None, "")
    assert code == TritonError.INVALID_ARG
    assert reason in message
    assert len(sender.responses) == 1


def test_execute_never_raises(model: Any) -> None:
    class Broken(InferenceRequest):
        def inputs(self) -> list[Any]:
            raise MemoryError("secret detail")

    class Hopeless(InferenceRequest):
        def get_response_sender(self) -> Any:
            raise RuntimeError("the server is confused")

    broken = [Broken({"text_input": "a"}) for _ in range(50)]
    good = InferenceRequest({"text_input": "a", "stream": True, "sampling_parameters": '{"max_tokens": 1}'})
    model.execute([Hopeless({"text_input": "a"}), *broken, good])
    for request in broken:
        code, message = request.sender.wait().error or (None, "")
        assert code == TritonError.INTERNAL
        assert "secret" not in message
        assert "Traceback" not in message
    assert good.sender.wait().text == "b"


def test_stop_string_frees_the_engine(model: Any) -> None:
    flags = {"return_finish_reason": True}
    sender = ask(model, "a", sampling={**LONG, "stop": ["fg"]}, **flags).sender.wait()
    assert sender.text == "bcde"
    assert sender.outputs("finish_reason")[-1] == b"stop"
    eventually(lambda: num_in_engine(model) == 0, "the engine has dropped the request")


def test_cancelled_requests_stop_running_and_queued_ones_never_run(model: Any) -> None:
    running = [ask(model, "a", sampling=LONG).sender for _ in range(8)]  # max_num_seqs
    eventually(lambda: all(sender.responses for sender in running), "all slots are taken")
    queued = ask(model, "a", sampling=LONG).sender
    queued.cancel()
    assert queued.wait().error == (TritonError.CANCELLED, "Request was cancelled")
    assert queued.text == ""
    for sender in running[:5]:
        sender.cancel()
    for sender in running[:5]:
        assert sender.wait().error == (TritonError.CANCELLED, "Request was cancelled")
    eventually(lambda: num_in_engine(model) == 3, "the others go on")
    model._responder.end_all(4, "over")
    eventually(lambda: num_in_engine(model) == 0, "nothing is left")


def test_cancellation_while_the_request_is_on_its_way_to_the_engine(model: Any, monkeypatch: Any) -> None:
    submit, num_cancelled = model._client.submit, model._client.members[0].stats.num_cancelled

    def cancelled_meanwhile(request: Any, answer: Any) -> None:
        sender = answer.live.response_sender
        sender.cancel()
        sender.wait()  # answered while the engine client does not know of the request yet
        submit(request, answer)

    monkeypatch.setattr(model._client, "submit", cancelled_meanwhile)
    assert ask(model, "a", sampling=LONG).sender.wait().error == (TritonError.CANCELLED, "Request was cancelled")
    monkeypatch.undo()
    eventually(lambda: model._client.members[0].stats.num_cancelled == num_cancelled + 1, "the engine has dropped it")


@pytest.mark.parametrize("text", ["<fail-row>a", "<fail-step>a"])
def test_failures_in_the_engine_are_internal_errors_without_traces(model: Any, text: str) -> None:
    code, message = ask(model, text, sampling={"max_tokens": 2}).sender.wait().error or (None, "")
    assert code == TritonError.INTERNAL
    assert "told to fail" not in message
    assert ask(model, "a", sampling={"max_tokens": 2}).sender.wait().text == "bc"


def test_t1_metrics_that_fail_stop_neither_requests_nor_the_thread_that_publishes(model: Any, monkeypatch: Any) -> None:
    failures = []

    def fail(*_: Any) -> None:
        failures.append(1)
        raise TritonModelException("the server has lost this metric")

    with monkeypatch.context() as patch:
        for name in ("increment", "set", "observe"):
            patch.setattr(Metric, name, fail)
        assert ask(model, "a", sampling={"max_tokens": 3}).sender.wait().text == "bcd"
        eventually(lambda: len(failures) >= 2, "publishing is tried again and again")
    key = ("cb_requests_total", (("model", "llm"), ("outcome", "length"), ("version", "1")))
    before = MetricFamily.exported[key].value
    assert ask(model, "a", sampling={"max_tokens": 3}).sender.wait().text == "bcd"
    eventually(lambda: MetricFamily.exported[key].value > before, "it is published once more")


def test_is_ready_and_killed_engine(model: Any, folder: Path) -> None:
    assert model.is_ready()
    senders = [ask(model, "a", sampling=LONG).sender for _ in range(8)]
    eventually(lambda: all(sender.responses for sender in senders), "all run")
    (folder / "gate").touch()
    os.kill(model._client.members[0].life.pid, signal.SIGKILL)
    for sender in senders:
        code, message = sender.wait().error or (None, "")
        assert code == TritonError.UNAVAILABLE
        assert "send the request again" in message
    assert not model.is_ready()
    assert (ask(model, "a").sender.wait().error or (None,))[0] == TritonError.UNAVAILABLE
    (folder / "gate").unlink()
    eventually(model.is_ready, "the engine is back")
    assert ask(model, "a", sampling={"max_tokens": 2}).sender.wait().text == "bc"


def test_draining_refuses_new_requests_and_finalize_answers_the_rest(folder: Path) -> None:
    from cb_backend.serving.backend import TritonPythonModel

    model, other = TritonPythonModel(), TritonPythonModel()
    repository = make_repository(folder / "two")
    model.initialize(server_args(repository, 0, parameters={"sender_threads": {"string_value": "1"}}))
    other.initialize(server_args(repository, 1))
    pid = model._client.members[0].life.pid
    assert other._client.members[0].life.pid == pid
    open_sender = ask(model, "a", sampling=LONG).sender
    model._housekeeping._drain._deadline = time.monotonic() + 0.5
    assert not model.is_ready()
    code, message = ask(model, "a").sender.wait().error or (None, "")
    assert code == TritonError.UNAVAILABLE
    assert "another server" in message
    code, message = open_sender.wait().error or (None, "")  # at the deadline
    assert code == TritonError.UNAVAILABLE
    assert "did not end in time" in message
    late = ask(other, "a", sampling=LONG).sender
    other.finalize()
    assert (late.wait().error or (None,))[0] == TritonError.UNAVAILABLE
    assert is_running(pid)
    model.finalize()
    assert not is_running(pid)
    assert not model.is_ready()


def test_failed_loads_say_why(folder: Path) -> None:
    from cb_backend.serving.backend import TritonPythonModel

    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"max_num_sequences": 3}, {}, "unknown engine argument 'max_num_sequences'"),
        ({"model": "no-such-model"}, {}, "'no-such-model' does not exist"),
        ({}, {"parameters": {"sender_threads": {"string_value": "many"}}}, "sender_threads in config.pbtxt"),
        ({}, {"parameters": {"slow_reader_timeout_s": {"string_value": "0"}}}, "slow_reader_timeout_s in config.pbtxt"),
        ({"stream_interval": 0}, {}, "stream_interval is 0; it must be at least 1"),
    ]
    for index, (arguments, config, reason) in enumerate(cases):
        model = TritonPythonModel()
        with pytest.raises(CbError, match=reason) as caught:
            model.initialize(server_args(make_repository(folder / f"bad{index}", **arguments), **config))
        assert isinstance(caught.value, ConfigError)
        assert model.is_ready() is False  # newer servers ask at any time
        model.finalize()  # the server calls it on a failed model too
