"""What `cb-backend serve` takes, and what it says before it waits for ever: pytest tests/cli/test_serve.py"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from cb_backend.cli import main as cli_main
from cb_backend.cli import serve
from cb_backend.cli.demo_model import ensure_demo_model
from cb_backend.cli.paths import CliError, checkout_path
from cb_backend.cli.server import local_server, start_up
from cb_backend.cli.server.model_repository import check_model_repository, odd_characters, plain_path
from cb_backend.cli.server.server_process import ServerProcess
from cb_backend.cli.server.start_up import wait_ready_aloud
from cb_backend.contracts.errors import ConfigError
from cb_backend.models.checkpoint import resolve_checkpoint, resolve_tokenizer
from cb_backend.support.version_folder import load_engine_config
from tests.cli.test_repositories import make_repository
from tests.cli.test_serve_addresses import not_started


def parsed(*words: str) -> argparse.Namespace:
    return cli_main._parse("serve", ["serve", *words])


def repository_of(folder: Path, *words: str) -> Path:
    """The model repository that these words make `serve` start a server on."""
    made: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "_serve", lambda args, repository, folder: made.append(_kept(repository, folder)) or 0)
        patch.setattr(serve.tempfile, "TemporaryDirectory", lambda prefix: _Folder(folder))
        assert serve.run(parsed(*words)) == 0
    return made[0]


class _Folder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> str:
        return str(self.folder)

    def __exit__(self, *_: object) -> None:
        pass


def _kept(repository: Path, folder: Path) -> Path:
    assert repository.is_relative_to(folder) or repository == checkout_path("model_repository")
    return repository


def engine_arguments(repository: Path) -> dict[str, object]:
    return dict(json.loads((repository / "llm" / "1" / "model.json").read_text()))


def test_h13_vllms_names_change_a_copy(tmp_path: Path) -> None:
    file = checkout_path("model_repository/llm/1/model.json")
    before = file.read_text()
    words = ["--max-model-len", "512", "--dtype=half", "--gpu-memory-utilization", "0.5", "--enforce-eager"]
    made = repository_of(tmp_path, *words, "--no-enable-prefix-caching", "--port", "8123")
    assert engine_arguments(made) == {
        **json.loads(before), "max_model_len": 512, "dtype": "float16", "gpu_memory_utilization": 0.5,
        "enforce_eager": True, "enable_prefix_caching": False,
    }  # fmt: skip
    assert load_engine_config(made / "llm" / "1" / "model.json").max_model_len == 512
    assert file.read_text() == before
    assert parsed("--port", "8123").http_port == 8123


def test_h13_the_model_may_stand_alone_and_what_follows_two_dashes_is_the_servers(tmp_path: Path) -> None:
    made = repository_of(tmp_path, str(tmp_path), "--max-num-seqs", "8", "--", "--log-verbose", "1")
    assert engine_arguments(made) == {"model": str(tmp_path), "max_model_len": None, "max_num_seqs": 8}
    args = parsed("org/name", "--", "--log-verbose", "1")
    assert (args.checkpoint, args.handed_on) == ("org/name", ["--log-verbose", "1"])
    args = parsed("--", "--log-verbose=1")
    assert (args.checkpoint, args.handed_on) == (None, ["--log-verbose=1"])
    assert repository_of(tmp_path) == checkout_path("model_repository")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["m", "--max-modle-len"], "unrecognized arguments: --max-modle-len; did you mean --max-model-len?"),
        (["--gpu_memory_utilization=0.5"], "did you mean --gpu-memory-utilization?"),
        (["a", "b"], "unrecognized arguments: b"),
    ],
)
def test_h13_a_wrong_argument_shows_the_commands_own_usage(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli_main.main(["serve", *words])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: cb-backend serve [MODEL] [options]")
    assert told in error


@pytest.mark.parametrize("command", [*cli_main.COMMANDS, "bench engine", "bench embed", "bench accuracy"])
def test_wrong_usage_is_shown_in_few_lines(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        cli_main.main([*command.split(), "--no-such-option"])
    assert end.value.code == 2
    usage, hint, error = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"usage: cb-backend {command.split()[0]}")
    assert f"cb-backend {command.split()[0]}" in error
    assert ": error: " in error
    assert hint.startswith(f"(cb-backend {command.split()[0]}")
    assert hint.endswith("--help says more)")


def test_h13_other_commands_show_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli_main.main(["demo", "--plian"])
    error = capsys.readouterr().err
    assert error.startswith("usage: cb-backend demo")
    assert "did you mean --plain?" in error


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--max-model-len", "many"], "engine argument 'max_model_len' must be of type int, got 'many'"),
        (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization is 1.5; it must be above 0 and at most 1"),
        (["--dtype", "int3"], "dtype is 'int3'; use one of auto, float32"),
        (["--model-repository", "x", "--dtype", "half"], "--dtype changes the checkout's llm model; with --model-repo"),
        (["org/a", "--model", "org/b"], "'org/a' and --model 'org/b' name two models; name one"),
        (["./gone"], "--model './gone' is neither a folder, a .gguf file nor a hub id like org/name"),
    ],
)
def test_h13_a_wrong_value_is_told_before_anything_starts(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_main.main(["serve", *words]) == 1
    assert told in capsys.readouterr().err


def test_r63e_another_checkpoint_has_the_length_of_its_own(tmp_path: Path) -> None:
    """The length in the checkout's file was chosen for the checkpoint beside it."""
    made = repository_of(tmp_path / "a", "--model", "org/short")
    assert load_engine_config(made / "llm" / "1" / "model.json").max_model_len is None
    made = repository_of(tmp_path / "b", "--model", "org/short", "--max-model-len", "100")
    assert load_engine_config(made / "llm" / "1" / "model.json").max_model_len == 100
    made = repository_of(tmp_path / "c", "--seed", "3")
    assert load_engine_config(made / "llm" / "1" / "model.json").max_model_len == 2048, "the same checkpoint"


# ---- a wait without an end -------------------------------------------------------------------------------------

LEAVES_A_DEAD_CHILD = (
    "import os, time\nprint('what():  stol', flush=True)\nos.fork() or os._exit(1)\ntime.sleep(3600)\n"
)
LISTENS_ELSEWHERE = "import time\nprint('\"Started HTTPService at nowhere:1\"', flush=True)\ntime.sleep(3600)\n"
NEVER_SAYS_A_WORD = "import time\ntime.sleep(3600)\n"


def hung_server(folder: Path, script: str) -> ServerProcess:
    binary = folder / "server"
    binary.write_text(f"#!{sys.executable}\n{script}")
    binary.chmod(0o755)
    return not_started(binary, model_repository=folder)


@pytest.fixture
def quick_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up, "STALLED_S", 0.2)
    monkeypatch.setattr(start_up, "LOOK_S", 0.05)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            LEAVES_A_DEAD_CHILD,
            r"a Python model's process has ended while it was started.*its last lines: what\(\):  st",
        ),
        (LISTENS_ELSEWHERE, r"says that it is there, but nobody answers at http://127\.0\.0\.1:\d+; --host must be"),
    ],
)
def test_r62c_a_start_that_cannot_end_ends_with_the_reason(
    tmp_path: Path, quick_waits: None, script: str, told: str
) -> None:
    server = hung_server(tmp_path, script)
    server.start()
    try:
        with pytest.raises(CliError, match=told):
            wait_ready_aloud(server, lambda text: None)
    finally:
        server.kill()


def test_r62c_a_server_that_is_merely_slow_is_waited_for(tmp_path: Path, quick_waits: None) -> None:
    server = hung_server(tmp_path, NEVER_SAYS_A_WORD)
    server.start()
    try:
        with pytest.raises(CliError, match=r"was not ready after \d+ s; its last line: it printed nothing"):
            wait_ready_aloud(server, lambda text: None, timeout=1.0)
    finally:
        server.kill()


def test_r62c_a_path_that_no_server_can_start_from_is_linked(tmp_path: Path) -> None:
    assert plain_path(tmp_path, tmp_path) == tmp_path
    assert plain_path(Path(), tmp_path) == Path()
    for number, name in enumerate(("my models", "models (old)", "größe")):
        odd = make_repository(tmp_path / name, '{"model": "org/name"}')
        (folder := tmp_path / str(number)).mkdir()
        link = plain_path(odd, folder)
        assert odd_characters(str(link)) == ""
        assert check_model_repository(link) == ["llm"]


@pytest.mark.parametrize(("name", "odd"), [("größe", "'ß' 'ö'"), ("my llm", "' '"), ("llm(2)", r"'\(' '\)'")])
def test_r63d_a_model_whose_name_no_server_can_start_is_named(tmp_path: Path, name: str, odd: str) -> None:
    repository = make_repository(tmp_path, '{"model": "org/name"}')
    (repository / "llm").rename(repository / name)
    with pytest.raises(CliError, match=f"the server cannot start a Python model whose name holds {odd}; rename .*"):
        check_model_repository(repository)


def test_r63d_models_of_other_backends_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "größe" / "1").mkdir(parents=True)
    (tmp_path / "größe" / "config.pbtxt").write_text('backend: "onnxruntime"\n')
    assert check_model_repository(tmp_path) == ["größe"]


# ---- folders that cannot be written ----------------------------------------------------------------------------


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home that is a file: nothing can be made in it, by nobody."""
    home = tmp_path / "home"
    home.write_text("")
    monkeypatch.delenv("CB_BACKEND_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(home))
    return home


TOLD = r"the cache folder .*/home/.cache/cb_backend/.* cannot be written \(Not a directory\); set CB_BACKEND_CACHE"


def test_r64b_a_home_that_cannot_be_written(no_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=TOLD):
        local_server.find_server()
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.json").write_text("{}")
    with pytest.raises(ConfigError, match=TOLD):
        resolve_tokenizer(None, old)


def test_r64b_a_cache_whose_path_the_server_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CB_BACKEND_CACHE", str(tmp_path / "my cache"))
    with pytest.raises(CliError, match="whose name holds ' '; set CB_BACKEND_CACHE"):
        local_server.find_server()


def test_h07_nothing_is_fetched_for_a_cache_that_cannot_be_written(
    no_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *words, **_: pytest.fail(f"ran {words}"))
    said: list[str] = []
    with pytest.raises(ConfigError, match=TOLD):
        ensure_demo_model(said.append)
    assert said == []


def test_h07_a_conversion_says_where_it_would_be_kept(no_cache: Path, tmp_path: Path) -> None:
    from tests.models.gguf_files import tiny_gguf

    _, file = tiny_gguf("qwen2-bias", tmp_path / "source")
    with pytest.raises(ConfigError, match=TOLD):
        resolve_checkpoint(str(file.write(tmp_path / "tiny.gguf")))
