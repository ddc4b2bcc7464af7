"""A model behind a real server whose weights are changed: while it serves, while it sleeps, and over a crash.

pytest tests/server/test_weight_updates.py
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from cb_backend.cli.main import main
from tests.models.noisy_copy import noisy_copy
from tests.server.conftest import RunningServer
from tests.server.raw_stream import RawStream
from tests.server.sleeping_server import GREEDY, PROMPTS, answer, answer_when_served, command, server
from tests.server.tiny_checkpoint import Reference, write_tiny_checkpoint

__all__ = ["server"]  # a fixture

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def other(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same specification."""
    return noisy_copy(checkpoint, tmp_path_factory.mktemp("other") / "checkpoint", 0.3)


def test_updated_weights_answer_from_the_next_request_on(
    server: RunningServer, checkpoint: Path, other: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    new = Reference(other)
    old_texts, new_texts = (
        [judge.greedy_text(prompt, GREEDY["max_tokens"]) for prompt in PROMPTS] for judge in (reference, new)
    )
    assert old_texts != new_texts
    assert [answer(server, prompt) for prompt in PROMPTS] == old_texts
    running = RawStream(server.url, "fox", {"max_tokens": 400, "temperature": 0, "ignore_eos": True})
    running.wait(num_texts=1)
    assert command(server, "update", "llm", str(other)) == 0
    assert running.wait().text.startswith(reference.greedy_text("fox", 24)), "who runs ends on the old weights"
    running.close()
    assert [answer(server, prompt) for prompt in PROMPTS] == new_texts, "not a cached prefix of the old ones either"
    assert command(server, "sleep", "llm") == 0
    assert [answer(server, prompt) for prompt in PROMPTS] == new_texts, "and after a sleep too"
    assert command(server, "update", "llm", str(checkpoint)) == 0
    assert [answer(server, prompt) for prompt in PROMPTS] == old_texts
    assert "name the folder there as well" in capsys.readouterr().out


def test_an_update_that_is_not_begun_in_time_is_called_off(
    server: RunningServer, other: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    running = RawStream(server.url, "fox", {"max_tokens": 3000, "temperature": 0, "ignore_eos": True})
    running.wait(num_texts=1)
    assert command(server, "update", "llm", str(other), "--timeout", "0.3") == 1
    assert "it will not happen any more" in capsys.readouterr().err
    assert answer(server, "fox") == reference.greedy_text("fox", GREEDY["max_tokens"])
    running.close(cancel=True)
    server.wait_idle()
    assert answer(server, "fox") == reference.greedy_text("fox", GREEDY["max_tokens"]), "nor later"


def test_a_folder_that_has_changed_while_the_model_slept_is_told_until_it_is_updated_or_put_back(
    server: RunningServer, checkpoint: Path, other: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, file, kept = reference.greedy_text("fox", 24), checkpoint / "model.safetensors", checkpoint / "kept"
    assert command(server, "sleep", "llm") == 0
    (engine,) = server.engine_pids()
    file.rename(kept)
    try:
        shutil.copy2(other / file.name, file)
        stream = RawStream(server.url, "fox", GREEDY).wait()
        stream.close()
        assert "has changed since" in stream.errors[0]
        assert "cb-backend update MODEL FOLDER" in stream.errors[0]
        assert command(server, "wake", "llm") == 1
        assert command(server, "update", "llm", str(checkpoint)) == 0
        assert answer(server, "fox") == Reference(other).greedy_text("fox", 24)
        assert command(server, "sleep", "llm") == 0
    finally:
        kept.replace(file)
    assert command(server, "wake", "llm") == 1, "those that slept are the new ones"
    assert command(server, "update", "llm", str(checkpoint)) == 0
    assert answer(server, "fox") == expected
    assert server.engine_pids() == [engine]
    capsys.readouterr()


def test_an_engine_that_dies_after_an_update_comes_back_with_the_new_weights(
    server: RunningServer, checkpoint: Path, other: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    new = Reference(other)
    assert command(server, "update", "llm", str(other)) == 0
    (engine,) = server.engine_pids()
    os.kill(engine, signal.SIGKILL)
    assert answer_when_served(server, "fox") == new.greedy_text("fox", GREEDY["max_tokens"])
    capsys.readouterr()
    assert main(["status", "--interval", "0.1"]) in (0, 1)  # of all that run here
    assert f"weights of {other}" in capsys.readouterr().out
    assert command(server, "update", "llm", str(checkpoint)) == 0
    assert answer(server, "fox") == reference.greedy_text("fox", GREEDY["max_tokens"])


def test_an_engine_that_dies_after_an_update_whose_folder_is_spoilt_serves_its_own_weights_and_says_so(
    server: RunningServer,
    checkpoint: Path,
    other: Path,
    reference: Reference,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    new = Path(shutil.copytree(other, tmp_path / "new"))
    assert command(server, "update", "llm", str(new)) == 0
    file = new / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    (engine,) = server.engine_pids()
    os.kill(engine, signal.SIGKILL)
    assert answer_when_served(server, "fox") == reference.greedy_text("fox", GREEDY["max_tokens"])
    capsys.readouterr()
    main(["status", "--interval", "0.1"])
    assert f"the weights of {new}, which an update had brought, cannot be loaded any more" in capsys.readouterr().out
    assert server.gauge("cb_engines_with_lost_update", "llm") == 1.0
    assert command(server, "update", "llm", str(checkpoint)) == 0
    capsys.readouterr()
    main(["status", "--interval", "0.1"])
    assert "cannot be loaded any more" not in capsys.readouterr().out


def test_weights_of_another_specification_are_refused_by_what_differs(
    server: RunningServer, tmp_path: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 8}))
    assert command(server, "update", "llm", str(folder)) == 1
    assert "another specification" in capsys.readouterr().err
    assert answer(server, "fox") == reference.greedy_text("fox", GREEDY["max_tokens"])
