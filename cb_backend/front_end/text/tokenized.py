"""A prompt as the model would get it, instead of an answer to it: tokens, text, and what a client must know of both.

The input `tokenize` asks for it with a JSON object of options. Nothing here is limited by the room for an answer: a
prompt that is too long is counted all the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.front_end.text.answer_forms import reasoning_form, tool_form
from cb_backend.front_end.text.chat import Chat
from cb_backend.front_end.text.prompt import MAX_TRUNCATION
from cb_backend.front_end.text.tokenizer import Tokenizer
from cb_backend.front_end.wire.protocol import GenerateRequest

OPTIONS = ("add_special_tokens", "return_token_strs")
THINK_MARK = "<think>"
_LAST_TOKENS = 16  # of a prompt, in which such a mark is looked for


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """`text`: what the tokens spell, special ones as they are written; `about`: JSON."""

    token_ids: list[int]
    text: str
    about: str


def tokenize_prompt(generate: GenerateRequest, tokenizer: Tokenizer, chat: Chat, max_model_len: int) -> TokenizedPrompt:
    """Of a request with the input `tokenize`. Raises `InvalidRequestError` for options or a prompt that mean nothing.

    Options: add_special_tokens (true; of `text_input`: those that the tokenizer puts around a text), return_token_strs
    (false). About, in JSON: tokens, count, max_model_len, token_strs, is_reasoning_open (an answer begins inside of its
    reasoning), tool_calls and reasoning (the forms of the model's answers, by their parsers' names).
    """
    options = _options(generate.tokenize or "")
    if generate.input_ids is not None:
        token_ids = generate.input_ids
    elif generate.messages is not None:
        token_ids = chat.encode(generate.messages)
    elif options.get("add_special_tokens", True) and (generate.text or tokenizer.adds_bos):
        token_ids = tokenizer.encode(generate.text, max_model_len, MAX_TRUNCATION)
    else:
        token_ids = tokenizer.encode_plain(generate.text, max_model_len, MAX_TRUNCATION)
    is_listing = options.get("return_token_strs", False)
    about: dict[str, Any] = {
        "tokens": token_ids,
        "count": len(token_ids),
        "max_model_len": max_model_len,
        "token_strs": [tokenizer.token_text(token_id) for token_id in token_ids] if is_listing else None,
        "is_reasoning_open": _is_reasoning_open(token_ids, tokenizer),
        "tool_calls": tool_form(tokenizer.chat_templates),
        "reasoning": reasoning_form(tokenizer.chat_templates),
    }
    return TokenizedPrompt(token_ids, tokenizer.decode_all(token_ids), json.dumps(about))


def _options(text: str) -> dict[str, bool]:
    try:
        options = json.loads(text)
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise InvalidRequestError(
            f"input 'tokenize' must be a JSON object of options ({{}} for none), got {text!r:.64}"
        )
    for name, value in options.items():
        if name not in OPTIONS:
            raise InvalidRequestError(f"input 'tokenize' has an unknown option {name!r:.64}; there are {OPTIONS}")
        if not isinstance(value, bool):
            raise InvalidRequestError(f"option {name!r} of input 'tokenize' must be true or false, got {value!r:.64}")
    return options


def _is_reasoning_open(token_ids: list[int], tokenizer: Tokenizer) -> bool:
    end = "".join(tokenizer.token_text(token_id) for token_id in token_ids[-_LAST_TOKENS:])
    return end.rstrip().endswith(THINK_MARK)
