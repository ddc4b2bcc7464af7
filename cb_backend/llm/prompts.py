"""A caller's prompts and parameters, as the requests that a server would have been sent.

They pass through the readers of served requests, so whatever is refused there is refused here with the same words.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from cb_backend.contracts.adapters import AdapterSource
from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.messages import ModelInfo
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.front_end.adapters import Adapters
from cb_backend.front_end.text.bad_words import bad_word_ids
from cb_backend.front_end.text.chat import Chat
from cb_backend.front_end.text.prompt import prompt_token_ids
from cb_backend.front_end.text.tokenizer import Tokenizer
from cb_backend.front_end.wire.protocol import GenerateRequest, parse_request
from cb_backend.front_end.wire.token_choice import check_token_choice
from cb_backend.llm.sampling import SamplingParams

# A text; token ids; chat messages; an object of messages and the chat template's arguments, as a server is sent it.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]


class Prepared(NamedTuple):
    """One prompt, checked and tokenised."""

    prompt: Prompt
    generate: GenerateRequest
    token_ids: list[int]
    rules: list[TokenRules]  # of each of its answers
    adapter: AdapterSource | None = None


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of it. A list of numbers is one prompt, and so is a list of messages.

    Raises `InvalidRequestError` for what is neither a prompt nor several.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    several: Any = prompts.tolist() if isinstance(prompts, np.ndarray) else prompts  # a number, of an array of none
    if not isinstance(several, Iterable) or isinstance(several, (bytes, bytearray)):
        raise InvalidRequestError(_no_prompt(prompts))
    given = list(several)
    if given and all(_is_id(each) for each in given):
        return [given]
    if given and all(isinstance(each, Mapping) and "role" in each for each in given):
        return [given]
    return given


def prepare(
    prompts: list[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    info: ModelInfo,
    tokenizer: Tokenizer,
    chat: Chat,
    adapters: Adapters,
) -> list[Prepared]:
    """Check everything before anything runs. Raises `InvalidRequestError`; of several prompts it names which."""
    if params is None or isinstance(params, SamplingParams):
        each = [params or SamplingParams()] * len(prompts)
    elif not isinstance(params, Sequence) or isinstance(params, (str, bytes)):
        raise InvalidRequestError(f"params must be SamplingParams, or a list of one a prompt, got {params!r:.80}")
    else:
        each = list(params)
        if len(each) != len(prompts):
            raise InvalidRequestError(
                f"there are {len(prompts)} prompts and {len(each)} sampling parameters; give one, or one a prompt"
            )
    prepared = []
    for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
        try:
            prepared.append(_prepare_one(prompt, own, info, tokenizer, chat, adapters))
        except InvalidRequestError as error:
            if len(prompts) == 1:
                raise
            raise InvalidRequestError(f"prompt {index}: {error}") from error
    return prepared


def _prepare_one(
    prompt: Prompt, params: SamplingParams, info: ModelInfo, tokenizer: Tokenizer, chat: Chat, adapters: Adapters
) -> Prepared:
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be SamplingParams, got {type(params).__name__}")
    inputs = {**_prompt_input(prompt), "exclude_input_in_output": np.array([True])}
    if params.logprobs is not None:
        inputs |= {"return_logprobs": np.array([True]), "return_cumulative_logprob": np.array([True])}
    generate = parse_request(inputs, params.to_json(), info.vocab_size, info.sampling_defaults)
    token_ids = prompt_token_ids(generate, tokenizer, chat, info.max_model_len)
    rules = generate.params.token_rules(bad_word_ids(generate.params.bad_words, tokenizer))
    check_token_choice(rules[0], info.eos_token_ids)
    return Prepared(prompt, generate, token_ids, rules, adapters.find(generate.params.lora_name))


def _prompt_input(prompt: Prompt) -> dict[str, np.ndarray[Any, Any]]:
    """The one input of a served request that carries such a prompt."""
    if isinstance(prompt, str):
        return {"text_input": _bytes(prompt)}
    if isinstance(prompt, Mapping):
        if "messages" not in prompt:
            raise InvalidRequestError(
                f"a prompt that is an object has 'messages' and the chat template's arguments, got {_keys(prompt)}; "
                f"give a text or token ids as they are"
            )
        return {"messages": _bytes(_json(dict(prompt)))}
    is_list = isinstance(prompt, (Sequence, np.ndarray)) and not isinstance(prompt, (bytes, bytearray))
    values = list(prompt) if is_list else None
    if values and all(_is_id(value) for value in values):
        ids = [int(value) for value in values if _is_id(value)]
        bad = next((value for value in ids if not 0 <= value < 1 << 31), None)
        if bad is not None:
            raise InvalidRequestError(f"token id {bad} is no id of any vocabulary")
        return {"input_ids": np.array(ids, np.int32)}
    if values and all(isinstance(value, Mapping) for value in values):
        return {"messages": _bytes(_json([dict(value) for value in values if isinstance(value, Mapping)]))}
    raise InvalidRequestError(_no_prompt(prompt))


def _no_prompt(value: Any) -> str:
    return f"a prompt must be a text, token ids or chat messages, got {value!r:.80}"


def _keys(mapping: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, mapping)) or "nothing"


def _is_id(value: Any) -> TypeGuard[int]:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"messages cannot be written as JSON: {error}") from None


def _bytes(text: str) -> np.ndarray[Any, Any]:
    try:
        return np.array([text.encode()], dtype=np.object_)
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the text is not valid Unicode: {error.reason} at {error.start}") from None
