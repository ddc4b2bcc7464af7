"""The JSON text of sampling parameters, as clients of vLLM write it, to `SamplingParams` and `SchedulingParams`.

Values may be strings ("0.7", "128", "false"), null means the default, and a name that has no effect here is refused
instead of ignored. Every failure is an `InvalidRequestError`. It does not know tensors or the model.
"""

from __future__ import annotations

import difflib
import json
import re
import secrets
from collections import Counter
from collections.abc import Callable
from typing import Any

from cb_backend.errors import InvalidRequestError
from cb_backend.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from cb_backend.scheduling_params import SchedulingParams

# All the stop strings and ids that are allowed fit with every character escaped; larger text cannot be valid.
MAX_JSON_BYTES = 128 * 1024
_MAX_DIGITS = 40  # of one integer: beyond, conversion alone would cost time
_MAX_SHOWN = 60  # characters of a client's value that an error repeats

_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,400}(\.[0-9]{0,400})?|\.[0-9]{1,400})([eE][+-]?[0-9]{1,9})?")
_BOOLS = {"true": True, "false": False, "1": True, "0": False}


def parse_params(text: str, vocab_size: int) -> tuple[SamplingParams, SchedulingParams]:
    """Parse and check one request's parameters; a seed is drawn where none is given.

    Raises `InvalidRequestError` that names the parameter, its value and the remedy.
    """
    values: dict[str, Any] = {}
    scheduling_values: dict[str, Any] = {}
    for name, value in _load_object(text).items():
        if name in _READERS:
            if value is None and name == "max_tokens":
                raise InvalidRequestError("max_tokens is null; give a number of at least 1 or leave it out")
            if value is not None:
                values[name] = _READERS[name](name, value)
        elif name in _SCHEDULING_READERS:
            if value is not None:
                scheduling_values[name] = _SCHEDULING_READERS[name](name, value)
        elif name in _NEUTRAL_VALUES:
            _check_neutral(name, value)
        else:
            _refuse_unknown(name)
    # vLLM writes "no seed" as -1 too.
    if values.get("seed", -1) == -1:
        values["seed"] = secrets.randbits(64)
    params = SamplingParams(**values)
    params.check(vocab_size)
    scheduling = SchedulingParams(**scheduling_values)
    scheduling.check()
    return params, scheduling


def check_json_size(num_bytes: int) -> None:
    """Refuse text that is too long before anything is done with it. Raises `InvalidRequestError`."""
    if num_bytes > MAX_JSON_BYTES:
        raise InvalidRequestError(
            f"sampling parameters have {num_bytes} bytes of JSON; at most {MAX_JSON_BYTES} are allowed"
            f" (stop may hold {MAX_STOP_STRINGS} strings)"
        )


def _load_object(text: str) -> dict[str, Any]:
    check_json_size(len(text))
    try:
        value = json.loads(text, object_pairs_hook=_object_without_duplicates, parse_int=_parse_int)
    except RecursionError:
        raise InvalidRequestError("sampling parameters are nested too deeply") from None
    except ValueError as error:
        raise InvalidRequestError(f"sampling parameters are not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"sampling parameters must be a JSON object, got {_show(value)}")
    return value


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = counts.most_common(1)[0][0]
        raise InvalidRequestError(f"sampling parameters give {_show(twice)} more than once")
    return result


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise InvalidRequestError(f"sampling parameters hold an integer of {len(digits)} digits")
    return int(digits)


# ---- values -------------------------------------------------------------------------------------------------------


def _read_int(name: str, value: Any) -> int:
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        return int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {_show(value)}")
    return value


def _read_float(name: str, value: Any) -> float:
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{name} must be a number, got {_show(value)}")
    return float(value)


def _read_bool(name: str, value: Any) -> bool:
    result = _BOOLS.get(str(value).strip().lower()) if isinstance(value, bool | int | str) else None
    if result is None:
        raise InvalidRequestError(f"{name} must be true or false, got {_show(value)}")
    return result


def _read_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be a string, got {_show(value)}")
    _refuse_surrogates(name, value)
    return value


def _refuse_surrogates(name: str, text: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidRequestError(f"{name} holds a lone surrogate, which is not a character: {_show(text)}")


def _read_strings(name: str, value: Any, most: int) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list):
        raise InvalidRequestError(f"{name} must be a string or a list of strings, got {_show(value)}")
    if len(strings) > most:
        raise InvalidRequestError(f"{name} has {len(strings)} strings; at most {most} are allowed")
    for text in strings:
        if not isinstance(text, str):
            raise InvalidRequestError(f"{name} must hold strings only, got {_show(text)}")
        _refuse_surrogates(name, text)
    return tuple(dict.fromkeys(strings))


def _read_stop(name: str, value: Any) -> tuple[str, ...]:
    return _read_strings(name, value, MAX_STOP_STRINGS)


def _read_bad_words(name: str, value: Any) -> tuple[str, ...]:
    return _read_strings(name, value, MAX_BAD_WORDS)


def _read_token_ids(name: str, value: Any, most: int) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise InvalidRequestError(f"{name} must be a list of token ids, got {_show(value)}")
    if len(value) > most:
        raise InvalidRequestError(f"{name} has {len(value)} ids; at most {most} are allowed")
    return tuple(dict.fromkeys(_read_int(name, token_id) for token_id in value))


def _read_stop_token_ids(name: str, value: Any) -> tuple[int, ...]:
    return _read_token_ids(name, value, MAX_STOP_TOKEN_IDS)


def _read_allowed_token_ids(name: str, value: Any) -> tuple[int, ...]:
    token_ids = _read_token_ids(name, value, MAX_ALLOWED_TOKEN_IDS)
    if not token_ids:
        raise InvalidRequestError(f"{name} is empty, so no token could be sampled; leave it out to allow all")
    return token_ids


def _read_logit_bias(name: str, value: Any) -> dict[int, float]:
    """An object of token id (JSON keys are strings) to number."""
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name} must be an object of token ids and numbers, got {_show(value)}")
    if len(value) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(f"{name} has {len(value)} entries; at most {MAX_LOGIT_BIASES} are allowed")
    biases = {_read_int(f"a token id in {name}", key): _read_float(f"a value in {name}", value[key]) for key in value}
    if len(biases) < len(value):
        raise InvalidRequestError(f"{name} gives a token id more than once")
    return biases


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "n": _read_int,
    "best_of": _read_int,
    "max_tokens": _read_int,
    "min_tokens": _read_int,
    "temperature": _read_float,
    "top_p": _read_float,
    "top_k": _read_int,
    "min_p": _read_float,
    "seed": _read_int,
    "stop": _read_stop,
    "stop_token_ids": _read_stop_token_ids,
    "ignore_eos": _read_bool,
    "include_stop_str_in_output": _read_bool,
    "skip_special_tokens": _read_bool,
    "truncate_prompt_tokens": _read_int,
    "logprobs": _read_int,
    "prompt_logprobs": _read_int,
    "presence_penalty": _read_float,
    "frequency_penalty": _read_float,
    "repetition_penalty": _read_float,
    "logit_bias": _read_logit_bias,
    "allowed_token_ids": _read_allowed_token_ids,
    "bad_words": _read_bad_words,
}


_SCHEDULING_READERS: dict[str, Callable[[str, Any], Any]] = {
    "priority": _read_int,
    "timeout_ms": _read_int,
    "queue_timeout_ms": _read_int,
    "cache_salt": _read_text,
    "tenant": _read_text,
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
    "structured_outputs": ("",),
    "guided_decoding": ("",),
    "guided_json": ("",),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "lora_name": ("",),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "thinking_token_budget": (),
    "extra_args": ({},),
}


def _check_neutral(name: str, value: Any) -> None:
    if value is None:
        return
    for neutral in _NEUTRAL_VALUES[name]:
        if _equals(value, neutral):
            return
    if name == "lora_name":
        raise InvalidRequestError(LORA_NOT_ENABLED)
    choices = " or ".join(json.dumps(neutral) for neutral in _NEUTRAL_VALUES[name] if neutral != "")
    only = f", only {choices} is accepted" if choices else ""
    raise InvalidRequestError(f"{name} is not supported yet (got {_show(value)}{only}); remove it")


def _equals(value: Any, neutral: Any) -> bool:
    """Whether a JSON value, or a string that spells it, is the neutral one; true is not 1."""
    if isinstance(neutral, bool):
        return isinstance(value, bool | str) and _BOOLS.get(str(value).strip().lower()) is neutral
    if isinstance(neutral, int | float):
        if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
            return float(value) == neutral
        return not isinstance(value, bool) and isinstance(value, int | float) and value == neutral
    return type(value) is type(neutral) and bool(value == neutral)


def _refuse_unknown(name: str) -> None:
    known = [*_READERS, *_SCHEDULING_READERS, *_NEUTRAL_VALUES]
    close = difflib.get_close_matches(name, known, n=1) if len(name) <= _MAX_SHOWN else []
    hint = f"; did you mean {close[0]!r}?" if close else "; remove it"
    raise InvalidRequestError(f"unknown sampling parameter {_show(name)}{hint}")


def _show(value: Any) -> str:
    """A client's value for an error text: cut before it is turned into text, printable."""
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'JSON object'} of {len(value)} entries"
    text = repr(value[: _MAX_SHOWN + 1] if isinstance(value, str) else value)
    return text.encode("ascii", "backslashreplace").decode() if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
