"""Sampling parameters in JSON, as clients of vLLM write it, to `SamplingParams` and `SchedulingParams`.

Values may be strings ("0.7", "128", "false"), lists and objects JSON text of them, null means the default, and a name
that has no effect here is refused instead of ignored. Every failure is an `InvalidRequestError`. It does not know
tensors or the model.
"""

from __future__ import annotations

import difflib
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from cb_backend.errors import InvalidRequestError
from cb_backend.front_end.wire.json_values import (
    MAX_SHOWN,
    equals,
    load_json,
    read_bool,
    read_float,
    read_int,
    read_strings,
    read_structure,
    read_text,
    show,
)
from cb_backend.front_end.wire.structured_json import STRUCTURED_NAMES, read_structured_output
from cb_backend.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENS,
    SamplingParams,
)
from cb_backend.scheduling_params import SchedulingParams
from cb_backend.structured_output import MAX_GRAMMAR_BYTES

# All that is allowed fits: stop strings with every character escaped, and a grammar whose text is escaped twice.
MAX_JSON_BYTES = 512 * 1024


def load_parameters(parameters: str, sampling: str | None) -> dict[str, Any]:
    """One request's parameters by name, from both places that can carry them, as JSON text of an object.

    parameters: the request parameters; "" for none. sampling: the input `sampling_parameters`; where both name a
    parameter, this one counts. Raises `InvalidRequestError`.
    """
    return _load_object("request parameters", parameters or "{}") | _load_object(
        "sampling parameters", "{}" if sampling is None else sampling
    )


def read_params(
    given: dict[str, Any], vocab_size: int, defaults: Mapping[str, float] | None = None
) -> tuple[SamplingParams, SchedulingParams]:
    """Read and check one request's parameters; a seed is drawn where none is given.

    defaults: of the model, for parameters that the request leaves out or that are null.
    Raises `InvalidRequestError` that names the parameter, its value and the remedy.
    """
    values: dict[str, Any] = dict(defaults or {})
    scheduling_values: dict[str, Any] = {}
    structured_values: dict[str, Any] = {}
    for name, value in given.items():
        if name in _READERS:
            if value is None and name == "max_tokens":
                raise InvalidRequestError("max_tokens is null; give a number of at least 1 or leave it out")
            if value is not None:
                values[name] = _READERS[name](name, value)
        elif name in _SCHEDULING_READERS:
            if value is not None:
                scheduling_values[name] = _SCHEDULING_READERS[name](name, value)
        elif name in STRUCTURED_NAMES:
            structured_values[name] = value
        elif name in _NEUTRAL_VALUES:
            _check_neutral(name, value)
        else:
            _refuse_unknown(name)
    # vLLM writes "no seed" as -1 too.
    if values.get("seed", -1) == -1:
        values["seed"] = secrets.randbits(64)
    structured_output = read_structured_output(structured_values)
    if structured_output is not None and "max_tokens" not in values:
        # It says itself where the answer ends; half a JSON object helps nobody. The model's length bounds it.
        values["max_tokens"] = MAX_TOKENS
    params = SamplingParams(**values, structured_output=structured_output)
    params.check(vocab_size)
    scheduling = SchedulingParams(**scheduling_values)
    scheduling.check()
    return params, scheduling


def check_json_size(num_bytes: int) -> None:
    """Refuse text that is too long before anything is done with it. Raises `InvalidRequestError`."""
    if num_bytes > MAX_JSON_BYTES:
        raise InvalidRequestError(
            f"sampling parameters have {num_bytes} bytes of JSON; at most {MAX_JSON_BYTES} are allowed"
            f" (stop may hold {MAX_STOP_STRINGS} strings, a grammar {MAX_GRAMMAR_BYTES} bytes)"
        )


def _load_object(name: str, text: str) -> dict[str, Any]:
    check_json_size(len(text))
    value = load_json(name, text)
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name} must be a JSON object, got {show(value)}")
    return value


# ---- values -------------------------------------------------------------------------------------------------------


def _read_stop(name: str, value: Any) -> tuple[str, ...]:
    return read_strings(name, value, MAX_STOP_STRINGS)


def _read_bad_words(name: str, value: Any) -> tuple[str, ...]:
    return read_strings(name, value, MAX_BAD_WORDS)


def _read_token_ids(name: str, value: Any, most: int) -> tuple[int, ...]:
    value = read_structure(name, value)
    if not isinstance(value, list):
        raise InvalidRequestError(f"{name} must be a list of token ids, got {show(value)}")
    if len(value) > most:
        raise InvalidRequestError(f"{name} has {len(value)} ids; at most {most} are allowed")
    return tuple(dict.fromkeys(read_int(name, token_id) for token_id in value))


def _read_stop_token_ids(name: str, value: Any) -> tuple[int, ...]:
    return _read_token_ids(name, value, MAX_STOP_TOKEN_IDS)


def _read_allowed_token_ids(name: str, value: Any) -> tuple[int, ...]:
    token_ids = _read_token_ids(name, value, MAX_ALLOWED_TOKEN_IDS)
    if not token_ids:
        raise InvalidRequestError(f"{name} is empty, so no token could be sampled; leave it out to allow all")
    return token_ids


def _read_logit_bias(name: str, value: Any) -> dict[int, float]:
    """An object of token id (JSON keys are strings) to number."""
    value = read_structure(name, value)
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name} must be an object of token ids and numbers, got {show(value)}")
    if len(value) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(f"{name} has {len(value)} entries; at most {MAX_LOGIT_BIASES} are allowed")
    biases = {read_int(f"a token id in {name}", key): read_float(f"a value in {name}", value[key]) for key in value}
    if len(biases) < len(value):
        raise InvalidRequestError(f"{name} gives a token id more than once")
    return biases


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "n": read_int,
    "best_of": read_int,
    "max_tokens": read_int,
    "min_tokens": read_int,
    "temperature": read_float,
    "top_p": read_float,
    "top_k": read_int,
    "min_p": read_float,
    "seed": read_int,
    "stop": _read_stop,
    "stop_token_ids": _read_stop_token_ids,
    "ignore_eos": read_bool,
    "include_stop_str_in_output": read_bool,
    "skip_special_tokens": read_bool,
    "spaces_between_special_tokens": read_bool,
    "truncate_prompt_tokens": read_int,
    "logprobs": read_int,
    "prompt_logprobs": read_int,
    "presence_penalty": read_float,
    "frequency_penalty": read_float,
    "repetition_penalty": read_float,
    "logit_bias": _read_logit_bias,
    "allowed_token_ids": _read_allowed_token_ids,
    "bad_words": _read_bad_words,
}


_SCHEDULING_READERS: dict[str, Callable[[str, Any], Any]] = {
    "priority": read_int,
    "timeout_ms": read_int,
    "queue_timeout_ms": read_int,
    "cache_salt": read_text,
    "tenant": read_text,
}


# ---- names of vLLM that are not built yet ---------------------------------------------------------------------------

LORA_NOT_ENABLED = "LoRA feature is not enabled."  # clients of vllm_backend compare with this text

# Accepted at the value that changes nothing (null always is one); any other value is refused by name.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "use_beam_search": (False,),
    "flat_logprobs": (False,),
    "logprob_token_ids": (),
    "logits_processors": ([],),
    "guided_decoding_backend": ("auto", "guidance"),
    "guided_whitespace_pattern": ("",),
    "lora_name": ("",),
    "detokenize": (True,),
    "thinking_token_budget": (),
    "extra_args": ({},),
}


def _check_neutral(name: str, value: Any) -> None:
    if value is None:
        return
    value = read_structure(name, value)
    for neutral in _NEUTRAL_VALUES[name]:
        if equals(value, neutral):
            return
    if name == "lora_name":
        raise InvalidRequestError(LORA_NOT_ENABLED)
    choices = " or ".join(json.dumps(neutral) for neutral in _NEUTRAL_VALUES[name] if neutral != "")
    only = f", only {choices} is accepted" if choices else ""
    raise InvalidRequestError(f"{name} is not supported yet (got {show(value)}{only}); remove it")


def _refuse_unknown(name: str) -> None:
    known = [*_READERS, *_SCHEDULING_READERS, *STRUCTURED_NAMES, *_NEUTRAL_VALUES]
    close = difflib.get_close_matches(name, known, n=1) if len(name) <= MAX_SHOWN else []
    hint = f"; did you mean {close[0]!r}?" if close else "; remove it"
    raise InvalidRequestError(f"unknown sampling parameter {show(name)}{hint}")
