"""Adapters as models of OpenAI's client, in front of a real server: pytest tests/gateway/test_adapters.py"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.gateway.conftest import running_gateway
from tests.server.conftest import running_server
from tests.server.tiny_adapters import MergedReference, write_adapter
from tests.server.tiny_checkpoint import Reference, write_tiny_checkpoint

pytestmark = pytest.mark.server

PROMPT = "the quick brown fox"
NAMES = ("doll", "sheep")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    checkpoint = write_tiny_checkpoint(folder / "tiny")

    def prepare(repository: Path) -> None:
        version = repository / "llm" / "1"
        for seed, name in enumerate(NAMES):
            write_adapter(version / name, checkpoint, seed)
        (version / "multi_lora.json").write_text(json.dumps({name: name for name in NAMES}))

    with (
        running_server(checkpoint, folder / "models", front_ends=1, prepare=prepare, enable_lora=True) as server,
        running_gateway(server.url, "--model-repository", str(folder / "models")) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def expected(folder: Path, name: str) -> str:
    checkpoint = folder / "tiny"
    reference = MergedReference(checkpoint, folder / "models" / "llm" / "1" / name) if name else Reference(checkpoint)
    return reference.greedy_text(PROMPT, 16)


def test_adapters_are_listed_as_models_and_answer_as_themselves(client: openai.OpenAI, folder: Path) -> None:
    models = ["llm", "llm_lora_doll", "llm_lora_sheep"]
    assert [model.id for model in client.models.list()] == models
    assert client.models.retrieve("llm_lora_sheep").id == "llm_lora_sheep"
    texts = set()
    for model, name in zip(models, ("", *NAMES), strict=True):
        answer = client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=16)
        assert (answer.model, answer.choices[0].text) == (model, expected(folder, name))
        stream = client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=16, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == answer.choices[0].text
        texts.add(answer.choices[0].text)
    assert len(texts) == 3


def test_a_chat_with_an_adapter(client: openai.OpenAI) -> None:
    def chat(model: str) -> str | None:
        return (
            client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": PROMPT}], temperature=0, max_tokens=16
            )
            .choices[0]
            .message.content
        )

    assert len({chat("llm"), chat("llm_lora_doll"), chat("llm_lora_sheep")}) == 3


def test_unknown_adapters_and_two_names(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'llm_lora_wolf' does not exist here; there is: llm, llm_lora_doll"):
        client.completions.create(model="llm_lora_wolf", prompt=PROMPT)
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        client.models.retrieve("llm_lora_wolf")
    with pytest.raises(openai.BadRequestError, match="'lora_name' is not supported: the model 'llm_lora_doll' names"):
        client.completions.create(model="llm_lora_doll", prompt=PROMPT, extra_body={"lora_name": "sheep"})
    with pytest.raises(openai.BadRequestError, match=r"LoRA wolf is not supported, we currently support"):
        client.completions.create(model="llm", prompt=PROMPT, extra_body={"lora_name": "wolf"})
