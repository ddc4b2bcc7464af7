"""What goes wrong at the server as OpenAI's clients are told, and what the keys' file may hold."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest

from cb_backend.cli.paths import checkout_path
from cb_backend.contracts.errors import ConfigError
from cb_backend.front_end.engines import engine_client
from cb_backend.gateway.errors import ApiError, from_rpc, from_stream
from cb_backend.gateway.settings import ApiKeys, Settings, read_names

TEXTS_OF_OURS = [
    engine_client.ENGINE_GONE,
    engine_client.ENGINE_STARTING,
    engine_client.ENGINE_STUCK.format(30),
    engine_client.LINE_BROKEN,
    "the server is stopping and the request did not end in time; send it to another server",
    "the engine ended the request; send it again",
    "the server is stopping this model; send the request to another server or again later",
    "timed out after 50 ms in the queue (queue_timeout_ms); try again later",
    "timed out after 50 ms in the queue (timeout_ms); try again later",  # which may be the server's limit
]
OWN_LIMIT = ["timed out after 50 ms (timeout_ms) before its last token"]


@pytest.mark.parametrize("text", TEXTS_OF_OURS)
def test_what_may_succeed_later_is_a_503_that_says_when(text: str) -> None:
    error = from_stream(text)
    assert (error.status, error.headers()) == (503, {"retry-after": "1"})
    assert error.body()["error"] == {"message": text, "type": "server_error", "param": None, "code": None}


@pytest.mark.parametrize("text", OWN_LIMIT)
def test_a_clients_own_limit_is_a_504_that_is_not_to_be_sent_again(text: str) -> None:
    """OpenAI's client does send again what fails with a status of 500 and more, unless it is told not to."""
    unavailable = from_rpc(Failed(grpc.StatusCode.UNAVAILABLE, text), "here:1")
    for error in (from_stream(text), unavailable):
        assert (error.status, error.headers(), error.message) == (504, {"x-should-retry": "false"}, text)


def test_the_texts_above_are_those_of_the_package() -> None:
    """Of rooms that import only inside of the server."""
    serving, scheduler = checkout_path("cb_backend/serving"), checkout_path("cb_backend/engine/scheduler")
    source = "".join(path.read_text() for path in [*sorted(serving.glob("*.py")), *sorted(scheduler.glob("*.py"))])
    for text in TEXTS_OF_OURS[4:7]:
        assert f'"{text}"' in source
    assert "in the queue ({name}); try again later" in source
    assert "(timeout_ms) before its last token" in source


def test_what_is_wrong_stays_wrong() -> None:
    assert from_stream("parameter 'temperature' must be at most 100").status == 400
    assert from_stream("the engine could not compute this request; the server's log says why").status == 500


class Failed(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__()
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


@pytest.mark.parametrize(("code", "status"), [
    (grpc.StatusCode.INVALID_ARGUMENT, 400), (grpc.StatusCode.NOT_FOUND, 404), (grpc.StatusCode.UNAVAILABLE, 503),
    (grpc.StatusCode.DEADLINE_EXCEEDED, 504), (grpc.StatusCode.INTERNAL, 500), (grpc.StatusCode.UNKNOWN, 500),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
])  # fmt: skip
def test_codes_of_the_server(code: grpc.StatusCode, status: int) -> None:
    assert from_rpc(Failed(code, "no such thing"), "here:1").status == status


def test_a_server_that_is_not_there_is_named() -> None:
    error = from_rpc(Failed(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses"), "here:1")
    assert "no Triton server answers at here:1" in error.message


def test_a_keys_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys(path)
    path.write_text("# none\n\n")
    with pytest.raises(ConfigError, match="has no key"):
        ApiKeys(path)
    path.write_text("one\n")
    keys = ApiKeys(path)
    assert keys.are_right(b"Bearer one")
    assert keys.are_right(b"bearer  one ")
    for wrong in (b"", b"one", b"Bearer", b"Bearer ", b"Bearer onex", b"Basic one", b"Bearer one two"):
        assert not keys.are_right(wrong)
    path.write_text("")
    os.utime(path, ns=(1, 1))
    assert keys.are_right(b"Bearer one")  # half written: those of before


@pytest.mark.parametrize("key", ["sk-a#b", "#b", "a#"])
def test_a_key_may_hold_the_sign_that_begins_a_comment(key: str, tmp_path: Path) -> None:
    """A key that were cut there would be refused, and what is left of it let in."""
    path = tmp_path / "keys"
    path.write_text(f"# whose: {key}\n  # more\nother\n x{key} # ours\ny{key}\t#theirs\n")
    keys = ApiKeys(path)
    for right in ("other", f"x{key}", f"y{key}"):
        assert keys.are_right(f"Bearer {right}".encode())
    for wrong in ("x", "y", "xa", "xsk-a", key, f"x{key} # ours", "#", "# more"):
        assert not keys.are_right(f"Bearer {wrong}".encode()), wrong


def test_a_keys_file_that_goes_bad_is_told_once_and_keeps_its_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever empties it to shut everybody out must learn that it did not."""
    file = tmp_path / "keys"
    file.write_text("one\n")
    keys = ApiKeys(file)
    for change in (lambda: file.write_text(""), lambda: file.unlink(), lambda: file.write_bytes(b"\xff\xfe")):
        caplog.clear()
        change()
        assert [keys.are_right(b"Bearer one") for _ in range(3)] == [True] * 3
        (record,) = caplog.records
        assert str(file) in record.message
        assert "the keys that it had stay valid" in record.message
        file.write_text("one\n#\n")
        assert keys.are_right(b"Bearer one")
    file.write_text("two\n")
    assert not keys.are_right(b"Bearer one")


def test_names_of_parsers() -> None:
    assert read_names("--tool-parser", ["hermes", "llm=mistral"]) == {"": "hermes", "llm": "mistral"}
    with pytest.raises(ConfigError, match="'xml' is none of auto, hermes"):
        read_names("--tool-parser", ["llm=xml"])
    settings = Settings("here:1", tool_parsers={"": "hermes", "llm": "mistral"}, allow_origins=("http://a",))
    assert Settings.from_json(settings.to_json()) == settings
    assert settings.reading("llm").tools == "mistral"
    assert settings.reading("other").tools == "hermes"
    assert settings.reading("other").reasoning == "auto"


@pytest.mark.parametrize(("message", "names", "param"), [
    ("max_tokens must be between 1 and 2147483647, got 0", {"max_tokens"}, "max_tokens"),
    ("max_tokens must be between 1 and 2147483647, got 0", {"max_completion_tokens"}, "max_completion_tokens"),
    ("temperature must be a number, got \"x\"", {"temperature", "model"}, "temperature"),
    ("n is 2, but at temperature 0 all answers are the same", {"n", "temperature"}, "n"),
    ("prompt_logprobs=20 of a prompt of 9 tokens are 189 figures", {"prompt_logprobs"}, "prompt_logprobs"),
    ("unknown sampling parameter \"foo\"; did you mean x?", {"foo", "model"}, "foo"),
    ("length_penalty is not supported yet (got 2); remove it", {"length_penalty"}, "length_penalty"),
    ("temperature must be a number", {"model"}, None), ("the prompt has no tokens", {"prompt"}, None),
    ("", {"model"}, None),
])  # fmt: skip
def test_the_field_that_the_model_refuses_is_named(message: str, names: set[str], param: str | None) -> None:
    error = from_stream(message)
    error.find_param(names)
    assert error.param == param
    error = ApiError(503, message)
    error.find_param(names)
    assert error.param is None


def test_an_error_without_a_field() -> None:
    assert ApiError(404, "x", code="model_not_found").body() == {
        "error": {"message": "x", "type": "not_found_error", "param": None, "code": "model_not_found"}
    }
