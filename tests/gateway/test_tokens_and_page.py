"""`/tokenize`, `/detokenize` and the page at `/`, in front of a real server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.gateway.conftest import running_gateway
from tests.server.conftest import RunningServer
from tests.server.tiny_checkpoint import EOS, MAX_MODEL_LEN, write_tokenizer

pytestmark = pytest.mark.server

TEXT = "the quick brown fox, 東京 🙂"
MESSAGES = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "the lazy dog"}]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("reference")
    write_tokenizer(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def ask(gateway: str, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{gateway}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_h16_tokenize_in_vllms_form(gateway: str, reference: PreTrainedTokenizerFast) -> None:
    ids = reference(TEXT)["input_ids"]
    expected = {"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids, "token_strs": None}
    assert ask(gateway, "/tokenize", model="llm", prompt=TEXT) == expected
    assert ask(gateway, "/tokenize", prompt=TEXT, add_special_tokens=False) == expected
    with_texts = ask(gateway, "/tokenize", model="llm", prompt="the fox", return_token_strs=True)
    assert "".join(with_texts["token_strs"]) == "the fox"


def test_h16_tokenize_a_chat(gateway: str, reference: PreTrainedTokenizerFast) -> None:
    """The count is the one that the answer's usage has."""
    plain = [{**message, "role": message["role"].replace("developer", "system")} for message in MESSAGES]
    ids = reference.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    told = ask(gateway, "/tokenize", model="llm", messages=MESSAGES)
    assert told["tokens"] == ids
    answer = ask(gateway, "/v1/chat/completions", model="llm", messages=MESSAGES, max_tokens=1, temperature=0)
    assert answer["usage"]["prompt_tokens"] == told["count"]
    open_turn = ask(gateway, "/tokenize", model="llm", messages=MESSAGES, add_generation_prompt=False)
    assert open_turn["tokens"] == reference.apply_chat_template(plain, return_dict=False)


def test_h16_detokenize(gateway: str, reference: PreTrainedTokenizerFast) -> None:
    for text in (TEXT, f"a{EOS}b", " x"):
        assert ask(gateway, "/detokenize", model="llm", tokens=reference(text)["input_ids"]) == {"prompt": text}
    assert ask(gateway, "/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize(("path", "body", "status", "text"), [
    ("/tokenize", {}, 400, "'prompt' is missing"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "both given"),
    ("/tokenize", {"prompt": 1}, 400, "'prompt' must be a string, not a number"),
    ("/tokenize", {"prompt": "a", "temperature": 1}, 400, "'temperature' has no meaning here"),
    ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, 400, "a chat template says which"),
    ("/tokenize", {"messages": [{"role": "user"}]}, 400, "message 0 has no content"),
    ("/tokenize", {"prompt": "a", "model": "other"}, 404, "there is: llm"),
    ("/detokenize", {"tokens": "a"}, 400, "'tokens' must be a list"),
    ("/detokenize", {"tokens": [1, -1]}, 400, "token ids"),
    ("/detokenize", {"tokens": [10**6]}, 400, "outside the vocabulary"),
])  # fmt: skip
def test_h16_what_cannot_be_tokenized_is_told(
    gateway: str, path: str, body: dict[str, Any], status: int, text: str
) -> None:
    answer = httpx.post(f"{gateway}{path}", json=body, timeout=60)
    assert answer.status_code == status
    assert text in answer.json()["error"]["message"].replace("whole number", "number")


def test_tokens_are_no_requests_of_the_engine(gateway: str, gateway_server: RunningServer) -> None:
    before = re.findall(r"^cb_requests_total.*$", gateway_server.metrics(), re.MULTILINE)
    ask(gateway, "/tokenize", model="llm", prompt=TEXT)
    assert re.findall(r"^cb_requests_total.*$", gateway_server.metrics(), re.MULTILINE) == before


def test_tokens_over_triton_itself(gateway_server: RunningServer) -> None:
    """Without a gateway the same is an input of the model."""
    status, text = gateway_server.post("/v2/models/llm/generate", {"text_input": TEXT, "tokenize": "{}"})
    assert status == 200, text
    answer = json.loads(text)
    assert answer["text_output"] == TEXT
    assert json.loads(answer["tokenized"])["max_model_len"] == MAX_MODEL_LEN


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/ping"])
def test_probes_of_other_servers_work(path: str, gateway: str) -> None:
    assert httpx.get(f"{gateway}{path}").status_code == 200


def test_h16_the_page(gateway: str) -> None:
    """One file: it names no other host, so it works where there is no network, and tells nobody that it is read."""
    answer = httpx.get(f"{gateway}/")
    assert answer.headers["content-type"].startswith("text/html")
    page = answer.text
    for link in ("v1/models", "health", "/v1/chat/completions", "/tokenize"):
        assert link in page
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?:https?:)?//", page)
    assert not re.findall(r"https?://", page)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "innerHTML" not in page


def test_h16_the_page_shows_nothing_without_a_key(gateway_server: RunningServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\n")
    with running_gateway(gateway_server.url, "--api-key-file", str(keys)) as address:
        page = httpx.get(f"{address}/")
        assert page.status_code == 200
        assert "llm" not in re.sub(r'includes\("llm"\)|value = "llm"', "", page.text)
        for path in ("/v1/models", "/tokenize", "/detokenize"):
            assert httpx.request("GET" if path == "/v1/models" else "POST", f"{address}{path}").status_code == 401
        headers = {"authorization": "Bearer first"}
        answer = httpx.post(f"{address}/tokenize", json={"prompt": TEXT}, headers=headers, timeout=60)
        assert answer.json()["count"] == len(_tokens(tmp_path))


def _tokens(folder: Path) -> list[int]:
    write_tokenizer(folder)
    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids)
