"""`cb-backend chat` against a server that speaks the protocol and answers what the test says."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cb_backend.cli import chat as command
from cb_backend.cli.main import main
from cb_backend.cli.server.addresses import refuse_http
from cb_backend.cli.server.server_process import free_ports
from cb_backend.cli.terminal.chat_commands import HELP, Commands
from cb_backend.cli.terminal.conversation import Answer, Conversation
from tests.fakes.triton_server import FakeTriton, fake_triton
from tests.waiting import WAIT_S, eventually


@pytest.fixture
def triton() -> Iterator[tuple[FakeTriton, str]]:
    with fake_triton(num_workers=8) as running:
        yield running


def messages(server: FakeTriton, index: int = -1) -> list[Any]:
    asked = [inputs for inputs in server.asked if "tokenize" not in inputs]
    return list(json.loads(asked[index]["messages"])["messages"])


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Lines at the prompt, then Ctrl-D."""
    rest = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)


def test_h16_chat_has_a_history(
    triton: tuple[FakeTriton, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server, address = triton
    server.answer = ["Bon", "jour", "."]
    typed(monkeypatch, "Hello", "", '"""two', "lines", 'of it"""', "/bye", "never said")
    assert main(["chat", "--url", address, "--system", "Be brief.", "--temperature", "0"]) == 0
    assert messages(server, 0) == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert messages(server)[1:] == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Bonjour."},
        {"role": "user", "content": "two\nlines\nof it"},
    ]
    assert len([inputs for inputs in server.asked if "tokenize" not in inputs]) == 2
    sampling = json.loads(server.asked[-1]["sampling_parameters"])
    assert sampling["temperature"] == 0
    assert capsys.readouterr().out.count("Bonjour.\n") == 2


def test_h16_chat_commands_change_what_is_asked(
    triton: tuple[FakeTriton, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server, address = triton
    server.answer = ["yes"]
    kept = tmp_path / "kept.json"
    typed(
        monkeypatch, "one", "/retry", "two", "/undo", f"/save {kept}", "/clear", "three", "/system Be kind.",
        f"/load {kept}", "/set top_k 5", "/set stop ]", "/unset top_k", "four", "/nonsense", "/show",
    )  # fmt: skip
    assert main(["chat", "llm", "--url", address]) == 0
    texts = [[m["content"] for m in messages(server, i)] for i in range(5)]
    assert texts[:4] == [["one"], ["one"], ["one", "yes", "two"], ["three"]]
    assert texts[4] == ["one", "yes", "four"]
    assert [m["role"] for m in messages(server)] == ["user", "assistant", "user"]
    sampling = json.loads(server.asked[-1]["sampling_parameters"])
    assert sampling["stop"] == "]"
    assert "top_k" not in sampling
    said = capsys.readouterr().out
    assert "there is no command '/nonsense'" in said
    assert "assistant: yes" in said


def test_h16_chat_an_error_is_told_and_the_chat_goes_on(
    triton: tuple[FakeTriton, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server, address = triton
    server.error = "prompt has 9000 tokens; at most 4095 fit"
    typed(monkeypatch, "long", "/set nonsense {", "/set messages []", "/show")
    assert main(["chat", "--url", address]) == 0
    said = capsys.readouterr()
    assert "error: prompt has 9000 tokens" in said.err
    assert "nonsense = " in said.out
    assert "'messages' is the chat's own" in said.out
    assert "nothing has been said yet" in said.out  # a question without an answer is not kept


def test_h16_chat_one_message(
    triton: tuple[FakeTriton, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By an option, or through a pipe: stdout is the answer alone, without its reasoning."""
    server, address = triton
    server.answer = ["<think>", "Well.", "</think>", "\n\n", "42"]
    assert main(["chat", "--url", address, "-q", "How much?", "--verbose"]) == 0
    said = capsys.readouterr()
    assert said.out == "42\n"
    assert "7 prompt tokens, 5 tokens, first after" in said.err
    monkeypatch.setattr("sys.stdin", io.StringIO("How many?\nAll?\n"))
    assert main(["chat", "--url", address]) == 0
    assert capsys.readouterr().out == "42\n"
    assert messages(server) == [{"role": "user", "content": "How many?\nAll?"}]
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    assert main(["chat", "--url", address]) == 1
    assert "there is no message" in capsys.readouterr().err


@pytest.mark.parametrize("is_once", [True, False])
def test_what_makes_a_cut_answer_longer_can_be_done(
    is_once: bool, triton: tuple[FakeTriton, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where one message is asked, nobody can type a command."""
    _, address = triton
    typed(monkeypatch, "hi")
    assert main(["chat", "--url", address, "--max-tokens", "2", *(["-q", "hi"] if is_once else [])]) == 0
    told = "".join(capsys.readouterr())
    assert "the answer was cut: " in told
    assert ("--max-tokens N" in told, "/set max_tokens N" in told) == (is_once, not is_once)


@pytest.mark.parametrize(("words", "text"), [
    (["chat", "other"], "has no model 'other'; it has llm, second"),
    (["chat", "--url", "127.0.0.1:1"], "no Triton server answers at 127.0.0.1:1"),
])  # fmt: skip
def test_h16_chat_without_its_model_or_server(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_triton(models=("llm", "second"), num_workers=4) as (_, address):
        assert main(words if "--url" in words else [*words, "--url", address]) == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("words", [["chat", "-q", "hi"], ["openai", "--port", str(free_ports(1)[0])]])
def test_who_names_the_http_port_is_told_of_the_other(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The server's HTTP port, as `status --url` has it."""

    class Triton(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # http.server's name
            self.send_response(200 if self.path == "/v2" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Triton) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            assert main([*words, "--url", f"127.0.0.1:{http.server_port}"]) == 1
        finally:
            http.shutdown()
            thread.join()
    said = capsys.readouterr().err
    assert f"what answers at 127.0.0.1:{http.server_port} speaks HTTP; name the server's gRPC port (8001" in said


def test_what_passes_grpc_on_may_speak_http_too() -> None:
    """A proxy answers HTTP as it likes; an address of a socket is none of HTTP's."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as http:  # 501 for every GET
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            refuse_http(f"127.0.0.1:{http.server_port}")
        finally:
            http.shutdown()
            thread.join()
    refuse_http("unix:/a/socket")


def test_h16_chat_says_how_to_start_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "DEFAULT_URL", "127.0.0.1:1")
    assert main(["chat"]) == 1
    said = capsys.readouterr().err
    assert "cb-backend serve" in said
    assert "cb-backend chat MODEL" in said
    assert main(["chat", "/nowhere/checkpoint"]) == 1
    assert "'/nowhere/checkpoint' is neither a folder" in capsys.readouterr().err


def test_h16_chat_ctrl_c_ends_the_answer_and_not_the_chat() -> None:
    """On a real terminal; the answer would take minutes, and what has come of it stays in the history."""
    with fake_triton(num_workers=8) as (server, address):
        server.pause_s = 0.05
        controller, terminal = pty.openpty()
        words = [sys.executable, "-m", "cb_backend.cli.main", "chat", "--url", address, "--max-tokens", "5000"]
        process = subprocess.Popen(words, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
        os.close(terminal)
        try:
            _read_until(controller, r">>> ")
            os.write(controller, b"Tell me a story.\n")
            _read_until(controller, r"word word")
            process.send_signal(signal.SIGINT)
            _read_until(controller, r"\(ended\)")
            eventually(lambda: server.num_open == 0, "the stream at the server has ended")
            server.answer = ["the", " end"]
            os.write(controller, b"And now?\n")
            _read_until(controller, r"the end[\s\S]*>>> ")  # before it asks, ^D would end no input
            first, second, third = messages(server)
            assert (first["content"], third["content"]) == ("Tell me a story.", "And now?")
            assert second["content"].startswith(" word word")
            os.write(controller, b"\x04")
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
            process.wait()
            os.close(controller)


def _read_until(terminal: int, pattern: str) -> str:
    text, deadline = "", time.monotonic() + WAIT_S
    while not re.search(pattern, text):
        assert time.monotonic() < deadline, text
        if select.select([terminal], [], [], 0.2)[0]:
            text += os.read(terminal, 4096).decode(errors="replace")
    return text


def test_every_command_is_explained() -> None:
    conversation = Conversation()
    commands = Commands(conversation, lambda: ["llm", "second"])
    said = commands.run("/?").text
    assert all(name in said for name in HELP)
    assert commands.run("/model").text == "llm\nsecond"
    assert commands.run("/model second").model == "second"
    assert "there is no model 'third'" in commands.run("/model third").text
    assert commands.run("/quit").is_end
    assert commands.run("/retry").text == "nothing has been asked yet"
    assert "/load: " in commands.run("/load /nowhere/file").text
    assert "give a file's name" in commands.run("/save").text


def test_h16_chat_goes_on_while_its_server_is_away(
    triton: tuple[FakeTriton, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server, address = triton
    lines = iter(["one", "/model", "two", "/show"])

    def read(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        if line == "/model":
            server.stop()
            monkeypatch.setattr("cb_backend.gateway.triton.MODELS_AGE_S", 0.0)
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    server.answer = ["yes"]
    assert main(["chat", "--url", address]) == 0
    said = capsys.readouterr()
    assert f"/model: no Triton server answers at {address}" in said.out
    assert "user: one" in said.out
    assert f"error: no Triton server answers at {address}" in said.err


@pytest.mark.parametrize(("kept", "text"), [
    ({"messages": [], "sampling": [1]}, "sampling an object"),
    ({"messages": [], "sampling": {"n": 2}}, "'n' is the chat's own"),
    ({"messages": [], "system": 7}, "system must be a text"),
    ({"messages": 7}, "holds no conversation of /save"),
])  # fmt: skip
def test_a_file_that_is_no_conversation_changes_nothing(kept: dict[str, Any], text: str, tmp_path: Path) -> None:
    conversation = Conversation("Be brief.", {"seed": 1})
    conversation.say("kept")
    path = tmp_path / "kept.json"
    path.write_text(json.dumps(kept))
    assert text in Commands(conversation, list).run(f"/load {path}").text
    assert (conversation.system, conversation.sampling, len(conversation.messages)) == ("Be brief.", {"seed": 1}, 1)


def test_h16_chat_a_pipe_with_letters_of_another_encoding(triton: tuple[FakeTriton, str]) -> None:
    """As a diff of an old file has them."""
    server, address = triton
    server.answer = ["42"]
    words = [sys.executable, "-m", "cb_backend.cli.main", "chat", "--url", address]
    done = subprocess.run(words, input=b"caf\xe9 is coffee", capture_output=True, check=False, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (0, b"42\n"), done.stderr
    assert messages(server) == [{"role": "user", "content": "caf\N{REPLACEMENT CHARACTER} is coffee"}]


def test_a_conversation_keeps_what_has_come() -> None:
    conversation = Conversation()
    conversation.say("a")
    conversation.take(Answer("half of it"))
    conversation.say("b")
    conversation.take(Answer(""))
    assert [m["content"] for m in conversation.messages] == ["a", "half of it"]
    assert conversation.take_back() == "a"
    assert conversation.messages == []
