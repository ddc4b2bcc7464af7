"""Values of a client's JSON as Python types: what may be written as a string, how much of it an error repeats.

Clients of vLLM write numbers and flags as strings too ("0.7", "128", "false"). Every failure is an
`InvalidRequestError` with the name, the value and the remedy. It does not know which names there are.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from cb_backend.contracts.errors import InvalidRequestError

MAX_DIGITS = 40  # of one integer: beyond, conversion alone would cost time
MAX_SHOWN = 60  # characters of a client's value that an error repeats

_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,400}(\.[0-9]{0,400})?|\.[0-9]{1,400})([eE][+-]?[0-9]{1,9})?")
_BOOLS = {"true": True, "false": False, "1": True, "0": False}


def load_json(name: str, text: str) -> Any:
    """The value of JSON text. An object that has a name twice is refused. `name` begins the error texts."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise InvalidRequestError(f"{name}: {show(twice)} more than once in one object")
        return result

    def parse_int(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise InvalidRequestError(f"{name}: an integer of {len(digits)} digits")
        return int(digits)

    try:
        return json.loads(text, object_pairs_hook=without_duplicates, parse_int=parse_int)
    except RecursionError:
        raise InvalidRequestError(f"{name}: nested too deeply") from None
    except ValueError as error:
        raise InvalidRequestError(f"{name}: not valid JSON: {error}") from None


def read_int(name: str, value: Any) -> int:
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        return int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {show(value)}")
    return value


def read_float(name: str, value: Any) -> float:
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{name} must be a number, got {show(value)}")
    return float(value)


def read_bool(name: str, value: Any) -> bool:
    result = _BOOLS.get(str(value).strip().lower()) if isinstance(value, bool | int | str) else None
    if result is None:
        raise InvalidRequestError(f"{name} must be true or false, got {show(value)}")
    return result


def read_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be a string, got {show(value)}")
    refuse_surrogates(name, value)
    return value


def refuse_surrogates(name: str, text: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidRequestError(f"{name} holds a lone surrogate, which is not a character: {show(text)}")


def read_structure(name: str, value: Any) -> Any:
    """A list or an object, also where it is written as JSON text: request parameters can hold text, but neither."""
    is_text = isinstance(value, str) and value.lstrip()[:1] in ("[", "{")
    return load_json(name, value) if is_text else value


def read_strings(name: str, value: Any, most: int) -> tuple[str, ...]:
    """A list of strings, one string, or JSON text of a list of strings; any other text stands for itself."""
    strings = _strings_of_text(value) if isinstance(value, str) else value
    if not isinstance(strings, list):
        raise InvalidRequestError(f"{name} must be a string or a list of strings, got {show(value)}")
    if len(strings) > most:
        raise InvalidRequestError(f"{name} has {len(strings)} strings; at most {most} are allowed")
    for text in strings:
        if not isinstance(text, str):
            raise InvalidRequestError(f"{name} must hold strings only, got {show(text)}")
        refuse_surrogates(name, text)
    return tuple(dict.fromkeys(strings))


def read_token_ids(name: str, value: Any, most: int, least: int = 0) -> tuple[int, ...]:
    """A list of integers, or JSON text of one; each id once."""
    value = read_structure(name, value)
    if not isinstance(value, list):
        raise InvalidRequestError(f"{name} must be a list of token ids, got {show(value)}")
    if len(value) < least:
        raise InvalidRequestError(f"{name} is empty, so no token could be sampled; leave it out to allow all")
    if len(value) > most:
        raise InvalidRequestError(f"{name} has {len(value)} ids; at most {most} are allowed")
    return tuple(dict.fromkeys(read_int(name, token_id) for token_id in value))


def read_biases(name: str, value: Any, most: int) -> dict[int, float]:
    """An object of token id (JSON keys are strings) to number, or JSON text of one."""
    value = read_structure(name, value)
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name} must be an object of token ids and numbers, got {show(value)}")
    if len(value) > most:
        raise InvalidRequestError(f"{name} has {len(value)} entries; at most {most} are allowed")
    biases = {read_int(f"a token id in {name}", key): read_float(f"a value in {name}", value[key]) for key in value}
    if len(biases) < len(value):
        raise InvalidRequestError(f"{name} gives a token id more than once")
    return biases


def _strings_of_text(text: str) -> list[str]:
    if text.lstrip().startswith("["):
        try:
            strings = load_json("a list of strings", text)
        except InvalidRequestError:  # a bracket with which a text begins
            return [text]
        if all(isinstance(string, str) for string in strings):
            return list(strings)
    return [text]


def equals(value: Any, neutral: Any) -> bool:
    """Whether a JSON value, or a string that spells it, is the neutral one; true is not 1."""
    if isinstance(neutral, bool):
        return isinstance(value, bool | str) and _BOOLS.get(str(value).strip().lower()) is neutral
    if isinstance(neutral, int | float):
        if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
            return float(value) == neutral
        return not isinstance(value, bool) and isinstance(value, int | float) and value == neutral
    return type(value) is type(neutral) and bool(value == neutral)


def show(value: Any) -> str:
    """A client's value for an error text: cut before it is turned into text, printable."""
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'JSON object'} of {len(value)} entries"
    if isinstance(value, bytes):  # a tensor's string
        value = value[: 4 * (MAX_SHOWN + 1)].decode(errors="replace")
    text = repr(value[: MAX_SHOWN + 1] if isinstance(value, str) else value)
    return text.encode("ascii", "backslashreplace").decode() if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
