"""What a prompt is to the model: tokens as transformers has them, forms of answers as templates have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.front_end.text.answer_forms import (
    ReasoningField,
    reasoning_field,
    reasoning_form,
    tool_form,
    with_reasoning,
)
from cb_backend.front_end.text.chat import Chat
from cb_backend.front_end.text.tokenized import TokenizedPrompt, tokenize_prompt
from cb_backend.front_end.text.tokenizer import Tokenizer
from cb_backend.front_end.wire.protocol import parse_request
from tests.front_end import answer_templates as shapes
from tests.front_end.test_chat import byte_level

MAX_MODEL_LEN = 512
USER = [{"role": "user", "content": "how are you?"}]


class Asked:
    """A model with one chat template, asked as the wire asks."""

    def __init__(self, folder: Path, template: str) -> None:
        backend = byte_level()
        backend.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
        backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>")])
        self.reference = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", chat_template=template)
        self.reference.save_pretrained(folder)
        self.tokenizer = Tokenizer(folder)
        self._chat = Chat(self.tokenizer)

    def prompt(self, options: Any = "{}", **inputs: Any) -> TokenizedPrompt:
        texts = {"tokenize": options if isinstance(options, str) else json.dumps(options)}
        texts |= {name: value for name, value in inputs.items() if isinstance(value, str)}
        arrays = {name: np.array([value.encode()], dtype=object) for name, value in texts.items()}
        if "input_ids" in inputs:
            arrays["input_ids"] = np.array(inputs["input_ids"], dtype=np.int32)
        request = parse_request(arrays, "", self.tokenizer.vocab_size)
        return tokenize_prompt(request, self.tokenizer, self._chat, MAX_MODEL_LEN)

    def about(self, messages: Any) -> dict[str, Any]:
        return dict(json.loads(self.prompt(messages=json.dumps(messages)).about))


@pytest.fixture
def ask(tmp_path: Path) -> Asked:
    return Asked(tmp_path, shapes.QWEN3)


def test_h16_tokens_of_a_text_are_those_of_transformers(ask: Asked) -> None:
    for text in ("hello there", "<|im_start|>user", "Grüße, 東京 🙂", " ", "x" * 2000):
        found = ask.prompt(text_input=text)
        assert found.token_ids == ask.reference(text)["input_ids"]
        assert found.text == text
        about = json.loads(found.about)
        assert (about["tokens"], about["count"]) == (found.token_ids, len(found.token_ids))
        assert (about["max_model_len"], about["token_strs"]) == (MAX_MODEL_LEN, None)


def test_h16_tokens_of_a_chat_are_those_of_transformers(ask: Asked) -> None:
    found = ask.prompt(messages=json.dumps(USER))
    expected = ask.reference.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
    assert found.token_ids == expected
    assert found.text == ask.reference.decode(expected)
    assert found.text.endswith("<|im_start|>assistant\n")


def test_h16_text_of_tokens_shows_special_ones(ask: Asked) -> None:
    ids = ask.reference("<|im_start|>hello<|im_end|>")["input_ids"]
    assert ask.prompt(input_ids=ids).text == "<|im_start|>hello<|im_end|>" == ask.reference.decode(ids)


def test_h16_tokens_each_as_a_text(ask: Asked) -> None:
    found = json.loads(ask.prompt({"return_token_strs": True}, text_input="hello there<|im_end|>").about)
    assert "".join(found["token_strs"]) == "hello there<|im_end|>"
    assert len(found["token_strs"]) == found["count"]


def test_special_tokens_around_a_text_can_be_left_out(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    ask = Asked(tmp_path / "one", shapes.PLAIN)
    backend = ask.reference.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    ask.reference.save_pretrained(tmp_path / "two")
    tokenizer = Tokenizer(tmp_path / "two")
    bos = tokenizer.bos_token_id
    for options, expected in (({}, [bos]), ({"add_special_tokens": True}, [bos]), ({"add_special_tokens": False}, [])):
        request = parse_request(
            {"text_input": np.array([b"a"], object), "tokenize": np.array([json.dumps(options).encode()], object)},
            "",
            400,
        )
        ids = tokenize_prompt(request, tokenizer, Chat(tokenizer), MAX_MODEL_LEN).token_ids
        assert ids[:-1] == expected


@pytest.mark.parametrize(("options", "text"), [
    ("[]", "must be a JSON object of options"),
    ("{", "must be a JSON object of options"),
    ('{"add_special": true}', "unknown option 'add_special'"),
    ('{"return_token_strs": 1}', "must be true or false, got 1"),
])  # fmt: skip
def test_wrong_options_are_told(ask: Asked, options: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text.replace("[", r"\[")):
        ask.prompt(options, text_input="a")


def test_what_cannot_be_a_prompt_is_told(ask: Asked) -> None:
    with pytest.raises(InvalidRequestError, match="shorten the prompt"):
        ask.prompt(text_input="x" * 10_000_000)
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        ask.prompt(input_ids=[10**6])
    with pytest.raises(InvalidRequestError, match="message 0 has no content"):
        ask.prompt(messages='[{"role": "user"}]')


@pytest.mark.parametrize(("shape", "tools", "reasoning"), [
    ("QWEN2", "hermes", "think"), ("QWEN3", "hermes", "think"), ("QWEN3_THINKING", "hermes", "think"),
    ("QWEN3_CODER", "none", "think"), ("GLM4_5", "none", "think"), ("LLAMA3_1", "llama3", "think"),
    ("LLAMA3_2", "llama3", "think"), ("MISTRAL", "mistral", "think"), ("GPT_OSS", "gpt-oss", "gpt-oss"),
    ("DEEPSEEK_R1", "none", "think"), ("PLAIN", "auto", "think"),
])  # fmt: skip
def test_forms_of_answers_by_templates(shape: str, tools: str, reasoning: str) -> None:
    templates = {"default": getattr(shapes, shape)}
    assert (tool_form(templates), reasoning_form(templates)) == (tools, reasoning)


def test_the_template_for_tools_counts() -> None:
    assert tool_form({"default": shapes.PLAIN, "tool_use": shapes.MISTRAL}) == "mistral"
    assert tool_form({"default": shapes.LLAMA3_1, "rag": shapes.MISTRAL}) == "llama3"
    assert tool_form({}) == "auto"


@pytest.mark.parametrize(("shape", "arguments", "is_open"), [
    ("QWEN3", {}, False), ("QWEN3", {"enable_thinking": False}, False), ("QWEN3_THINKING", {}, True),
    ("QWEN3_THINKING", {"add_generation_prompt": False}, False), ("SWITCHED", {}, True),
    ("SWITCHED", {"enable_thinking": False}, False), ("DEEPSEEK_R1", {}, True), ("PLAIN", {}, False),
])  # fmt: skip
def test_reasoning_that_the_prompt_leaves_open(
    tmp_path: Path, shape: str, arguments: dict[str, Any], is_open: bool
) -> None:
    asked = Asked(tmp_path, getattr(shapes, shape))
    assert asked.about({"messages": USER, **arguments})["is_reasoning_open"] is is_open


@pytest.mark.parametrize("options", [{}, {"add_special_tokens": True}, {"add_special_tokens": False}])
def test_a_text_far_beyond_the_model_is_refused_unread(ask: Asked, options: dict[str, bool]) -> None:
    with pytest.raises(InvalidRequestError, match="prompt has at least"):
        ask.prompt(options, text_input="x" * 4_000_000)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{% if message.reasoning_content is string %}{{ message.reasoning_content }}{% endif %}", "reasoning_content"),
        ("{% if 'thinking' in message %}{{ message['thinking'] }}{% endif %}", "thinking"),
        ('{{ m["reasoning"] }}', "reasoning"),
        (shapes.SWITCHED, None),  # `enable_thinking` is an argument, no field of a message
    ],
)
def test_the_field_of_a_messages_reasoning_is_read_off_the_template(source: str, name: str | None) -> None:
    assert reasoning_field(source) == (ReasoningField(name) if name else None)


def test_reasoning_moves_to_the_field_that_is_read_and_replaces_none() -> None:
    message, field = {"role": "assistant", "content": "", "reasoning": "because"}, ReasoningField("thinking")
    assert with_reasoning(message, field) == {**message, "thinking": "because"}
    assert with_reasoning({**message, "thinking": "so"}, field)["thinking"] == "so"
    assert with_reasoning(message, None) == message
    assert "thinking" not in with_reasoning({"role": "assistant", "reasoning": None}, field)
