"""What clients see of a healthy server: answers, streams, errors, cancellation. pytest tests/server/test_streams.py"""

from __future__ import annotations

import functools
import json
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from cb_backend.cli.paths import checkout_path, load_client
from tests.server.conftest import RunningServer
from tests.server.raw_stream import RawStream
from tests.server.tiny_checkpoint import MAX_MODEL_LEN, Reference
from tests.waiting import WAIT_S, eventually

pytestmark = pytest.mark.server

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "Grüße",
    "東京",
    "def",
    "add(a,",
    "b):",
    "🙂",
    "return",
    "wizards",
    "toxic",
    "Привет",
    "queen",
]
LONG = {"max_tokens": MAX_MODEL_LEN - 100, "temperature": 0, "ignore_eos": True}  # far longer than any test


FEW = {"max_tokens": 40, "ignore_eos": True, "seed": 3}


def make_requests(count: int, seed: int) -> list[tuple[str, int]]:
    """(prompt, max_tokens), short and long ones mixed."""
    draw = random.Random(seed)
    return [(" ".join(draw.choices(WORDS, k=draw.randint(1, 40))), draw.randint(1, 40)) for _ in range(count)]


def test_32_streams_at_once_give_the_text_of_requests_alone(server: RunningServer, reference: Reference) -> None:
    requests = make_requests(32, seed=1)
    streams = [RawStream(server.url, prompt, {"max_tokens": n, "temperature": 0}) for prompt, n in requests]
    for stream in streams:
        stream.wait().close()
    for (prompt, max_tokens), stream in zip(requests, streams, strict=True):
        assert stream.errors == []
        assert stream.num_finals == 1
        assert stream.text == reference.greedy_text(prompt, max_tokens)
        assert stream.finish_reasons[-1] in ("stop", "length")
        assert set(stream.finish_reasons[:-1]) <= {"None"}
    with ThreadPoolExecutor(4) as pool:
        alone = pool.map(lambda item: server.client.generate(item[0], max_tokens=item[1], temperature=0), requests)
    assert list(alone) == [stream.text for stream in streams]
    server.wait_idle()


def test_a_stream_arrives_in_pieces(server: RunningServer) -> None:
    responses = list(server.client.responses("the quick", is_streaming=True, **FEW))
    assert sum(response.num_output_tokens for response in responses) == 40
    assert [response.is_final for response in responses] == [False] * (len(responses) - 1) + [True]
    assert responses[-1].finish_reason == "length"
    num_responses = lambda: len(list(server.client.responses("the quick", is_streaming=True, **FEW)))  # noqa: E731
    eventually(lambda: num_responses() > 10, "it is not all sent at once, unless the sender did not run")


def test_same_seed_same_sample_whatever_the_neighbours(server: RunningServer) -> None:
    sampling = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 11, "ignore_eos": True}
    alone = server.client.generate("def add", **sampling)
    others = {**sampling, "seed": 12}
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda s: server.client.generate("def add", **s), [sampling, others] * 4))
    assert set(together[::2]) == {alone}
    assert set(together[1::2]) != {alone}


def test_100_cancelled_requests_leave_nothing(server: RunningServer) -> None:
    """The batch holds 16: the other 84 are cancelled while they wait in the queue."""
    streams = [RawStream(server.url, f"cancel me {i}", LONG) for i in range(100)]
    eventually(lambda: server.num_active_requests() == 100, "100 requests active")
    before = server.num_cancelled()
    streams[0].wait(num_texts=1)
    for stream in streams:
        stream.close(cancel=True)
    eventually(lambda: server.num_cancelled() == before + 100, "each has been ended before its end")
    server.wait_idle()
    assert len(server.client.generate("still there?", max_tokens=8, temperature=0, ignore_eos=True)) > 0


def test_closing_the_clients_iterator_cancels(server: RunningServer) -> None:
    pieces = server.client.stream("the quick", **LONG)
    assert isinstance(next(pieces), str)
    eventually(lambda: (server.num_used_blocks() or 0) > 0, "blocks in use")
    before = server.num_cancelled()
    pieces.close()
    eventually(lambda: server.num_cancelled() == before + 1, "it has been ended before its end")
    server.wait_idle()


BAD_REQUESTS = [
    pytest.param("x", '{"max_tokens": ', "JSON", id="bad JSON"),
    pytest.param("x", {"max_tokenz": 3}, "max_tokenz", id="unknown parameter"),
    pytest.param("x", {"temperature": -1}, "temperature must be between 0 and 100, got -1", id="bad value"),
    pytest.param("", {"max_tokens": 3}, "empty", id="empty prompt"),
    pytest.param("xyz " * MAX_MODEL_LEN, {"max_tokens": 3}, "tokens", id="over-long prompt"),
    pytest.param(b"abc\xff\xfe", {"max_tokens": 3}, "UTF-8", id="invalid UTF-8"),
]


@pytest.mark.parametrize(("prompt", "sampling", "message"), BAD_REQUESTS)
def test_bad_requests_get_the_reason_and_neighbours_finish(
    server: RunningServer, reference: Reference, prompt: str | bytes, sampling: dict[str, object] | str, message: str
) -> None:
    neighbours = [RawStream(server.url, word, {"max_tokens": 40, "temperature": 0}) for word in ("fox", "queen")]
    bad = RawStream(server.url, prompt, sampling).wait()
    bad.close()
    assert len(bad.errors) == 1
    assert bad.num_texts == 0
    assert message.lower() in bad.errors[0].lower()
    assert "Traceback" not in bad.errors[0]
    assert "/" not in bad.errors[0].replace("n/a", ""), "an error must not show paths"
    for word, neighbour in zip(("fox", "queen"), neighbours, strict=True):
        neighbour.wait().close()
        assert neighbour.errors == []
        assert neighbour.text == reference.greedy_text(word, 40)


def test_generate_over_http(server: RunningServer, reference: Reference) -> None:
    body = {
        "text_input": "the quick",
        "exclude_input_in_output": True,
        "parameters": {"max_tokens": 12, "temperature": 0},
    }
    status, text = server.post("/v2/models/llm/generate", body)
    assert status == 200
    expected = reference.greedy_text("the quick", 12)
    assert json.loads(text)["text_output"] == expected
    del body["exclude_input_in_output"]  # without it the answer begins with the prompt, as in the vLLM backend
    assert json.loads(server.post("/v2/models/llm/generate", body)[1])["text_output"] == "the quick" + expected
    status, text = server.post("/v2/models/llm/generate", {"text_input": "x", "parameters": {"max_tokens": 0}})
    assert status == 400
    assert "max_tokens" in json.loads(text)["error"]


def test_generate_stream_over_http(server: RunningServer, reference: Reference) -> None:
    parameters = {"max_tokens": 12, "temperature": 0}
    body = {"text_input": "the quick", "stream": True, "parameters": parameters}
    status, text = server.post("/v2/models/llm/generate_stream", body)
    assert status == 200
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert "".join(event["text_output"] for event in events) == reference.greedy_text("the quick", 12)


def generate(server: RunningServer, *arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(checkout_path("client/generate.py")), "--url", server.url, *arguments]
    # A shell's background job ignores Ctrl-C, and so would the script that it starts.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed)


def test_client_script(server: RunningServer, reference: Reference) -> None:
    one = generate(server, "the quick", "--stream", "--max-tokens", "12", "--temperature", "0")
    assert one.communicate(timeout=WAIT_S) == (reference.greedy_text("the quick", 12) + "\n", "")
    assert one.returncode == 0
    two = generate(server, "fox", "queen", "--max-tokens", "5", "--temperature", "0")
    out, _ = two.communicate(timeout=WAIT_S)
    assert two.returncode == 0
    for number, prompt in ((1, "fox"), (2, "queen")):
        lines = [line.removeprefix(f"[{number}] ") for line in out.split("\n") if line.startswith(f"[{number}] ")]
        assert "\n".join(lines) == reference.greedy_text(prompt, 5)
    bad = generate(server, "fox", "--temperature", "-1")
    assert "temperature must be between 0 and 100" in bad.communicate(timeout=WAIT_S)[1]
    assert bad.returncode == 1


def test_client_script_is_cancelled_by_ctrl_c(server: RunningServer) -> None:
    server.wait_idle()
    long = generate(server, "fox", "--stream", "--max-tokens", str(MAX_MODEL_LEN - 100), "--ignore-eos")
    try:
        assert long.stdout is not None
        assert long.stdout.read(1), "it prints what has come"
        long.send_signal(signal.SIGINT)
        _, errors = long.communicate(timeout=WAIT_S)
    finally:
        long.kill()
    assert long.returncode == 130
    assert "cancelled" in errors
    server.wait_idle()


def test_no_server_at_the_address(server: RunningServer) -> None:
    module = load_client()
    with pytest.raises(module.ServerUnreachableError, match=r"no server answers at 127\.0\.0\.1:1 "):
        module.Client("127.0.0.1:1").generate("x")
    assert not module.Client("127.0.0.1:1").is_ready()
    assert server.client.is_ready()
