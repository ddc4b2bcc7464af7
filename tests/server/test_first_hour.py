"""The first hour of a new user on a real server: pytest tests/server/test_first_hour.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cb_backend.cli.paths import checkout_path, load_client
from tests.server.conftest import RunningServer
from tests.server.test_streams import generate
from tests.server.tiny_checkpoint import EOS, Reference
from tests.waiting import WAIT_S

pytestmark = pytest.mark.server

GREEDY = {"max_tokens": 12, "temperature": 0}


def post(server: RunningServer, **body: Any) -> dict[str, Any]:
    """The answer of the generate endpoint, without the prompt."""
    status, text = server.post("/v2/models/llm/generate", {"exclude_input_in_output": True, **body})
    assert status == 200, text
    return dict(json.loads(text))


def said(text: str, system: str = "") -> str:
    """What the checkpoint's chat template makes of one user's message."""
    return (f"system: {system}{EOS}" if system else "") + f"user: {text}{EOS}assistant:"


def test_h01_request_parameters_count_beside_the_input(server: RunningServer, reference: Reference) -> None:
    body = {"text_input": "the quick", "sampling_parameters": '{"temperature": 0}', "max_tokens": 3}
    assert post(server, **body)["text_output"] == reference.greedy_text("the quick", 3)
    status, text = server.post("/v2/models/llm/generate", {**body, "max_tokns": 3})
    assert status == 400
    assert "unknown sampling parameter 'max_tokns'; did you mean 'max_tokens'?" in text


def test_h02_lists_as_text_over_http(server: RunningServer, reference: Reference) -> None:
    whole = reference.greedy_text("the quick", 12)
    stop = whole[5]
    found = post(server, text_input="the quick", stop=json.dumps([stop, "\u2603"]), **GREEDY)
    assert found["text_output"] == whole[: whole.index(stop)]
    found = post(server, text_input="the quick", logit_bias='{"7": 100}', **GREEDY)
    assert len(set(found["text_output"])) == 1


def test_h04_a_grammar_has_room_for_its_end(server: RunningServer) -> None:
    found = post(server, text_input="Letters:", guided_regex="[a-z]{60}", return_finish_reason=True)
    assert len(found["text_output"]) == 60
    assert found["finish_reason"] == "stop"
    cut = post(server, text_input="Letters:", guided_regex="[a-z]{60}", max_tokens=8, return_finish_reason=True)
    assert cut["finish_reason"] == "length"


def test_h08_the_first_curl_and_the_first_python_say_something_to_a_chat_model(server: RunningServer) -> None:
    """The bodies of the README's own commands, as they stand there."""
    readme = Path(checkout_path("README.md")).read_text(encoding="utf-8")
    bodies = [line.split(" -d '")[1].split("'")[0] for line in readme.splitlines() if line.startswith("curl -s")]
    assert "messages" in json.loads(bodies[0])
    assert all("max_tokens" in json.loads(body) for body in bodies)
    for body in bodies:
        assert post(server, **{**json.loads(body), "stream": False})["text_output"]
    blocks = [block.split("```")[0] for block in readme.split("```python\n")[1:]]
    with_client = next(block for block in blocks if "from cb_client import" in block)
    assert "client.chat(" in with_client


def test_h08_generate_py_chats(server: RunningServer, reference: Reference) -> None:
    one = generate(server, "--chat", "fox", "--stream", "--max-tokens", "12", "--temperature", "0")
    assert one.communicate(timeout=WAIT_S) == (reference.greedy_text(said("fox"), 12) + "\n", "")
    assert one.returncode == 0
    two = generate(server, "--chat", "fox", "--system", "queen", "--max-tokens", "12", "--temperature", "0")
    assert two.communicate(timeout=WAIT_S)[0] == reference.greedy_text(said("fox", "queen"), 12) + "\n"
    bad = generate(server, "fox", "--system", "queen")
    assert "--system is a chat message; give --chat as well" in bad.communicate(timeout=WAIT_S)[1]
    assert bad.returncode == 2


def test_h09_the_clients_messages(server: RunningServer, reference: Reference) -> None:
    client = load_client().Client(server.url)
    messages = [{"role": "system", "content": "queen"}, {"role": "user", "content": "fox"}]
    expected = reference.greedy_text(said("fox", "queen"), 12)
    assert client.chat(messages, **GREEDY) == expected
    assert "".join(client.stream(messages, **GREEDY)) == expected
    assert client.chat({"messages": messages, "add_generation_prompt": True}, **GREEDY) == expected
    assert client.chat("fox", **GREEDY) == reference.greedy_text(said("fox"), 12)
    assert client.generate_all([messages, "fox"], **GREEDY) == [expected, reference.greedy_text("fox", 12)]


def test_h09_messages_as_text_over_http(server: RunningServer, reference: Reference) -> None:
    found = post(server, messages=json.dumps([{"role": "user", "content": "fox"}]), **GREEDY)
    assert found["text_output"] == reference.greedy_text(said("fox"), 12)


def test_h09_a_message_without_a_role_is_named(server: RunningServer) -> None:
    client = load_client()
    with pytest.raises(client.ClientError, match="message 0 needs a role"):
        client.Client(server.url).chat([{"content": "fox"}], **GREEDY)
