"""OpenAI's fields as sampling parameters of the model. What OpenAI does not have goes on under its own name.

So every parameter of the model can be sent (`top_k`, `min_p`, `structured_outputs`, ...), and the model refuses by name
what it does not know: nothing that is sent is silently without effect.
"""

from __future__ import annotations

from typing import Any

from cb_backend.gateway.bodies import Body
from cb_backend.gateway.errors import bad_request

ALL_ROOM = 2**31 - 1  # the model lowers it to what the prompt leaves
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
MAX_LOGPROBS = 20

# What holds an answer to a form, by vLLM's names, which the model has too.
_FORMS = (
    "structured_outputs", "guided_decoding", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_json_object",
)  # fmt: skip

_PATTERNS = ("regex", "grammar", "guided_regex", "guided_grammar")

# About the caller, or about OpenAI's own service: no answer depends on them.
_NO_EFFECT = (
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "verbosity",
)  # fmt: skip


def take_sampling(body: Body, *, is_chat: bool) -> dict[str, Any]:
    """Everything of the body that is a parameter of the answer; the endpoint's own fields must have been taken.

    Raises `ApiError` for what has no meaning here.
    """
    body.drop(*_NO_EFFECT)
    sampling: dict[str, Any] = {}
    limit = body.take("max_tokens", int)
    if is_chat:
        newer = body.take("max_completion_tokens", int)
        limit = newer if newer is not None else limit
    sampling["max_tokens"] = limit if limit is not None else ALL_ROOM if is_chat else DEFAULT_COMPLETION_TOKENS
    wanted_form = _response_format(body.take("response_format", dict))
    sampling.update(body.left)
    body.left = {}
    if wanted_form is not None:
        if "structured_outputs" in sampling:
            raise bad_request("'response_format' and 'structured_outputs' are both given; send one", "response_format")
        sampling["structured_outputs"] = wanted_form
    return sampling


def answer_form(sampling: dict[str, Any]) -> dict[str, Any]:
    """Of `take_sampling`'s parameters those that hold the answer to a form, from its first token on."""
    return {name: sampling[name] for name in _FORMS if sampling.get(name)}


def patterns_of(form: dict[str, Any]) -> str:
    """What stands in a form's regular expressions and grammars; a schema's texts are no part of an answer."""
    objects = [form, *(each for each in form.values() if isinstance(each, dict))]
    return "\n".join(str(each[name]) for each in objects for name in _PATTERNS if name in each)


def _response_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is None or value.get("type") == "text":
        return None
    if value.get("type") == "json_object":
        return {"json_object": True}
    if value.get("type") == "json_schema":
        wrapper = value.get("json_schema")
        if not isinstance(wrapper, dict) or not isinstance(wrapper.get("schema"), dict):
            raise bad_request("'response_format.json_schema' must be an object with 'schema'", "response_format")
        return {"json": wrapper["schema"]}
    raise bad_request(
        f"'response_format.type' is {value.get('type')!r}; it must be text, json_object or json_schema",
        "response_format",
    )


def take_chat_logprobs(body: Body) -> int | None:
    """How many of the likeliest tokens to show beside each chosen one; None: no log-probabilities."""
    is_wanted, number = body.take("logprobs", bool), body.take("top_logprobs", int)
    if not is_wanted:
        if number:
            raise bad_request("'top_logprobs' needs 'logprobs': true", "top_logprobs")
        return None
    return _checked("top_logprobs", number or 0)


def take_completion_logprobs(body: Body) -> int | None:
    number = body.take("logprobs", int)
    return None if number is None else _checked("logprobs", number)


def _checked(name: str, number: int) -> int:
    if not 0 <= number <= MAX_LOGPROBS:
        raise bad_request(f"{name!r} is {number}; it must be 0 to {MAX_LOGPROBS}", name)
    return number
