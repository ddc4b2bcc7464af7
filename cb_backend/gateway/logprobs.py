"""The model's log-probabilities in the two forms that OpenAI has for them."""

from __future__ import annotations

import json
from typing import Any

NOT_ASKED_FOR = "null"
_PART_OF_CHARACTER = "\ufffd"


def token_entries(text: str) -> list[list[dict[str, Any]]]:
    """Of the output `logprobs`: for each new token the chosen one, then the likeliest ones."""
    if not text or text == NOT_ASKED_FOR:
        return []
    return [list(entry.values()) for entry in json.loads(text)]


def chat_logprobs(text: str, number: int) -> dict[str, Any] | None:
    """OpenAI's `choices[].logprobs` of chat completions."""
    content = []
    for chosen, *others in token_entries(text):
        likeliest = _likeliest([chosen, *others], number)
        content.append({**_shown(chosen), "top_logprobs": [_shown(entry) for entry in likeliest]})
    return {"content": content, "refusal": None} if content else None


def _likeliest(entries: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    return sorted(entries, key=lambda entry: entry["rank"])[:number]


def _shown(entry: dict[str, Any]) -> dict[str, Any]:
    token = entry["decoded_token"]
    # The server tells tokens by id and text, in vllm_backend's form, and writes the part of a character that a token
    # may be as U+FFFD: its bytes are not known here. OpenAI's form has null for that; a client that joins bytes sees
    # that some are missing, and takes the text. (The rare token that is U+FFFD itself looks the same.)
    is_known = _PART_OF_CHARACTER not in token
    told = list(token.encode("utf-8", errors="replace")) if is_known else None
    return {"token": token, "logprob": entry["logprob"], "bytes": told}


def completion_logprobs(text: str, number: int, offset: int) -> dict[str, Any] | None:
    """The older form, of completions. `offset`: characters of the answer before these tokens.

    `top_logprobs` has the sampled token as well, as OpenAI says: where it is none of the likeliest, after them.
    """
    result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chosen, *others in token_entries(text):
        token = chosen["decoded_token"]
        top: dict[str, float] = {}
        for entry in _likeliest([chosen, *others], number):
            top.setdefault(entry["decoded_token"], entry["logprob"])  # of equal texts the likeliest
        top[token] = chosen["logprob"]
        result["tokens"].append(token)
        result["token_logprobs"].append(chosen["logprob"])
        result["top_logprobs"].append(top)
        result["text_offset"].append(offset)
        offset += len(token)
    return result if result["tokens"] else None
