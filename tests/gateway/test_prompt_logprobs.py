"""Log-probabilities of the prompt, where vLLM shows them: in each choice of a completion, beside a chat's choices."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest

from cb_backend.gateway.triton import Model, Reply
from tests.gateway.told_server import CHAT, COMPLETION, MODEL, Server, ask
from tests.server.conftest import RunningServer

FIGURES = [None, {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "ä"}}]
MESSAGES = [{"role": "user", "content": "x"}]


class Telling(Server):
    """Gives each prompt's figures with its first response, as the backend does."""

    async def models(self) -> dict[str, Model]:
        return {"llm": dataclasses.replace(MODEL, outputs=MODEL.outputs | {"prompt_logprobs"})}

    async def stream(self, model: str, inputs: Mapping[str, Any], request_id: str) -> AsyncIterator[Reply]:
        self.asked.append(inputs)
        sampling = json.loads(inputs["sampling_parameters"])
        number = sampling.get("n", 1)
        figures = json.dumps([*FIGURES, inputs.get("text_input")]) if "prompt_logprobs" in sampling else ""
        yield Reply(["a"] * number, ["None"] * number, [], 3, [1] * number, prompt_logprobs=figures)
        yield Reply([""] * number, ["stop"] * number, [], 3, [0] * number, is_final=True)


def test_each_choice_of_a_completion_has_its_prompts() -> None:
    body = {"model": "llm", "prompt": ["x", "y"], "n": 2, "prompt_logprobs": 1}
    choices = ask(Telling(), COMPLETION, body).json()["choices"]
    assert [choice["prompt_logprobs"] for choice in choices] == [[*FIGURES, prompt] for prompt in "xxyy"]


def test_a_chat_has_them_beside_its_choices() -> None:
    answer = ask(Telling(), CHAT, {"model": "llm", "messages": MESSAGES, "prompt_logprobs": 2}).json()
    assert answer["prompt_logprobs"] == [*FIGURES, None]
    assert "prompt_logprobs" not in answer["choices"][0]


@pytest.mark.parametrize("body", [{"prompt": "x"}, {"messages": MESSAGES}])
def test_who_asks_for_none_is_shown_none(body: dict[str, Any]) -> None:
    answer = ask(Telling(), CHAT if "messages" in body else COMPLETION, {"model": "llm", **body})
    assert "prompt_logprobs" not in answer.text


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_they_are_refused_where_they_would_be_lost(path: str) -> None:
    """As vLLM refuses them of a stream; a model without the output computes them for nobody."""
    body = {"model": "llm", "prompt_logprobs": 0, **({"messages": MESSAGES} if path == CHAT else {"prompt": "x"})}
    for server, more, told in ((Telling(), {"stream": True}, "send 'stream': false"), (Server("a"), {}, "no output")):
        answer = ask(server, path, {**body, **more})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")
        assert told in answer.json()["error"]["message"]
        assert not server.asked


@pytest.mark.server
def test_they_are_the_models_own(gateway_server: RunningServer, gateway: str) -> None:
    sampling = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    body = {"model": "llm", "prompt": "the quick brown fox", **sampling}
    (choice,) = httpx.post(f"{gateway}{COMPLETION}", json=body, timeout=60).json()["choices"]
    _, text = gateway_server.post("/v2/models/llm/generate", {"text_input": body["prompt"], **sampling})
    assert choice["prompt_logprobs"] == json.loads(json.loads(text)["prompt_logprobs"])
    assert choice["prompt_logprobs"][0] is None
    messages = {"messages": MESSAGES, "model": "llm", "max_tokens": 1, "prompt_logprobs": 2}
    answer = httpx.post(f"{gateway}{CHAT}", json=messages, timeout=60).json()
    assert [len(figures) >= 2 for figures in answer["prompt_logprobs"][1:]] == [True] * (
        answer["usage"]["prompt_tokens"] - 1
    )
