"""A request's prompt as token ids, whichever way the client gave it. Knows the tokenizer and the model's length."""

from __future__ import annotations

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.request import check_prompt_length
from cb_backend.front_end.text.chat import Chat
from cb_backend.front_end.text.tokenizer import Tokenizer
from cb_backend.front_end.wire.protocol import GenerateRequest

# Text that is to be truncated may be this many times longer than the model's length before it is refused unread.
MAX_TRUNCATION = 16


def prompt_token_ids(generate: GenerateRequest, tokenizer: Tokenizer, chat: Chat, max_model_len: int) -> list[int]:
    """Token ids that leave room for at least one output token.

    With `truncate_prompt_tokens` k only the last k stay (-1: as many as fit); a BOS in front stays and is one of them.
    Raises `InvalidRequestError` for prompts that are empty or too long.
    """
    limit = generate.params.truncate_prompt_tokens
    if generate.input_ids is not None:
        token_ids = generate.input_ids
    elif generate.messages is not None:
        token_ids = chat.encode(generate.messages)
        if not token_ids:
            raise InvalidRequestError("the chat template made an empty prompt of the messages; send some text")
    else:
        token_ids = tokenizer.encode(generate.text, max_model_len, 1 if limit is None else MAX_TRUNCATION)
    if limit is not None:
        token_ids = truncated(token_ids, max_model_len - 1 if limit == -1 else limit, tokenizer.bos_token_id)
    check_prompt_length(len(token_ids), max_model_len)
    generate.params.check_prompt(len(token_ids))
    return token_ids


def truncated(token_ids: list[int], limit: int, bos: int | None) -> list[int]:
    """The last `limit` ids; a BOS in front stays and is one of them."""
    if len(token_ids) <= limit:
        return token_ids
    if token_ids[0] == bos and limit > 1:
        return [token_ids[0], *token_ids[len(token_ids) - limit + 1 :]]
    return token_ids[len(token_ids) - limit :]
