"""The texts that Triton's own OpenAI frontend is held to in `tests/peers`, through the gateway."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from tests.server.conftest import RunningServer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

from openai_cases import cases, read_events

DEFAULT_MAX_TOKENS = 16

pytestmark = pytest.mark.server


def test_every_case_is_our_own_clients_streamed_and_whole(gateway: str, gateway_server: RunningServer) -> None:
    arguments = json.loads((gateway_server.process.options.model_repository / "llm/1/model.json").read_text())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments["model"])
    wrong, num_asked = [], 0
    with httpx.Client(base_url=gateway, timeout=120) as http:
        for case in cases(gateway_server.client, tokenizer, DEFAULT_MAX_TOKENS, "vllm"):
            for is_stream in (False, True):
                num_asked += 1
                reason = case.compare(*ask(http, case.is_chat, case.body, is_stream))
                if reason:
                    wrong.append(f"{case.title}, {'streamed' if is_stream else 'whole'}: {reason}")
    assert wrong == []
    assert num_asked == 32


def ask(
    http: httpx.Client, is_chat: bool, body: dict[str, Any], is_stream: bool
) -> tuple[str, tuple[int, int], list[str]]:
    """Text, tokens of prompt and answer, and the tokens' texts where log-probabilities are asked for."""
    sent = {**body, "model": "llm", "stream": is_stream}
    if body.get("tool_choice") not in (None, "auto"):
        sent["parallel_tool_calls"] = False
    if is_stream:
        sent["stream_options"] = {"include_usage": True}
    answer = http.post("/v1/chat/completions" if is_chat else "/v1/completions", json=sent)
    assert answer.status_code == 200, answer.text
    if is_stream:
        *lines, end = [line for line in answer.text.split("\n\n") if line]
        assert end == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
    else:
        events = [answer.json()]
    return read_events(events)
