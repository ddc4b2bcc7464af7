"""Adapters through Triton's OpenAI frontend: its cases of `model`, and that each answer is the adapter's own.

What its own `test_lora.py` asks over HTTP, asked of the engine below: names with and without a separator, a model
without adapters, an adapter that there is not, lists of models. Texts are compared with our own client's.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from in_process_api import Server
from openai_cases import GREEDY, MESSAGES, PROMPT, read_events

from tests.server.tiny_adapters import write_adapter

SEPARATOR = "_lora_"
MODEL, PLAIN = "vllm_model", "vllm_plain"
ADAPTERS = ("doll", "sheep")


def add_adapters(repository: Path, checkpoint: Path, models: tuple[str, ...]) -> None:
    """The models take two adapters; `vllm_plain` is a copy of the first that takes none."""
    folders = {name: repository.parent / name for name in ADAPTERS}
    for seed, folder in enumerate(folders.values()):
        write_adapter(folder, checkpoint, seed)
    for model in models:
        version = repository / model / "1"
        arguments = json.loads((version / "model.json").read_text())
        (version / "model.json").write_text(json.dumps({**arguments, "enable_lora": "true"}))
        listed = {name: os.path.relpath(folder, version) for name, folder in folders.items()}
        (version / "multi_lora.json").write_text(json.dumps(listed))
    plain = repository / PLAIN / "1"
    plain.mkdir(parents=True)
    (plain.parent / "config.pbtxt").write_text((repository / MODEL / "config.pbtxt").read_text())
    (plain / "model.json").write_text(json.dumps(arguments))


async def lora_results(url: str, repository: Path, tokenizer: str, client: Any) -> AsyncIterator[tuple[str, str]]:
    """Title and reason of failure (empty: none) of every case."""
    from engine.triton_engine import TritonLLMEngine

    def engine_with(separator: str | None) -> Any:
        server = Server(url, [MODEL, PLAIN], repository)
        return TritonLLMEngine(server, tokenizer, 16, backend="vllm", lora_separator=separator)

    engine = engine_with(SEPARATOR)
    listed = [model.id for model in engine.models()]
    expected = [MODEL, *(f"{MODEL}{SEPARATOR}{name}" for name in ADAPTERS), PLAIN]
    yield "lora: models are listed with their adapters", "" if listed == expected else f"{listed}"
    without = [model.id for model in engine_with(None).models()]
    yield "lora: no separator, no adapters", "" if without == [MODEL, PLAIN] else f"{without}"
    texts = {}
    for name in ("", *ADAPTERS):
        for is_chat in (False, True):
            title = f"lora: {'chat' if is_chat else 'completion'}, {name or 'the model as it is'}"
            try:
                text, reason = await _compare(engine, client, name, is_chat)
            except Exception as error:  # of the frontend or of the server: the case's result, whatever it is
                text, reason = "", f"{type(error).__name__}: {error}"
            yield title, reason
            texts[name, is_chat] = text
    yield "lora: every adapter says something else", "" if len(set(texts.values())) == len(texts) else f"{texts}"
    for title, name, separator, message in refusals():
        yield title, await _refusal(engine_with(separator), name, message)


def refusals() -> Iterator[tuple[str, str, str | None, str]]:
    """Title, model, separator and what the frontend says; its own texts."""
    unknown = f"{MODEL}{SEPARATOR}unknown"
    yield "lora: an adapter that there is not", unknown, SEPARATOR, f"Unknown LoRA: unknown; for model: {unknown}"
    doll = f"{MODEL}{SEPARATOR}doll"
    yield "lora: a name without a separator", doll, None, f"Unknown model: {doll}"
    plain = f"{PLAIN}{SEPARATOR}doll"
    yield "lora: a model without adapters", plain, SEPARATOR, f"Unknown LoRA: doll; for model: {plain}"


async def _compare(engine: Any, client: Any, name: str, is_chat: bool) -> tuple[str, str]:
    answer = await _ask(engine, f"{MODEL}{SEPARATOR}{name}" if name else MODEL, is_chat)
    text, _, _ = read_events([json.loads(answer.model_dump_json())])
    prompt: Any = PROMPT
    if is_chat:
        prompt = engine.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    own = client.generate(prompt, **GREEDY, **({"lora_name": name} if name else {}))
    return text, "" if text == own else f"text {text!r} instead of {own!r}"


async def _refusal(engine: Any, name: str, message: str) -> str:
    try:
        await _ask(engine, name, is_chat=False)
    except Exception as error:
        return "" if str(error) == message else f"{type(error).__name__}: {error}"
    return "it was answered"


async def _ask(engine: Any, model: str, is_chat: bool) -> Any:
    from schemas.openai import CreateChatCompletionRequest, CreateCompletionRequest

    if is_chat:
        return await engine.chat(CreateChatCompletionRequest(model=model, messages=MESSAGES, **GREEDY))
    return await engine.completion(CreateCompletionRequest(model=model, prompt=PROMPT, **GREEDY))
