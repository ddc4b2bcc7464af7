"""Sampling parameters in JSON, as clients of vLLM write it, to `RequestParams` and `SchedulingParams`.

Values may be strings ("0.7", "128", "false"), lists and objects JSON text of them, null means the default, and a name
that has no effect here is refused instead of ignored. Every failure is an `InvalidRequestError`. It does not know
tensors or the model.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.request_params import MAX_STOP_STRINGS, RequestParams
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.structured_output import MAX_GRAMMAR_BYTES
from cb_backend.front_end.wire.json_values import MAX_SHOWN, equals, load_json, read_structure, show
from cb_backend.front_end.wire.parameters import BY_NAME, UNSUPPORTED, Target, Unsupported
from cb_backend.front_end.wire.structured_json import STRUCTURED_NAMES, read_structured_output

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
) -> tuple[RequestParams, SchedulingParams]:
    """Read and check one request's parameters.


    defaults: of the model, for parameters that the request leaves out or that are null.
    Raises `InvalidRequestError` that names the parameter, its value and the remedy.
    """
    values: dict[Target, dict[str, Any]] = {"request": dict(defaults or {}), "scheduling": {}}
    structured_values: dict[str, Any] = {}
    for name, value in given.items():
        if name in BY_NAME:
            if value is None and name == "max_tokens":
                raise InvalidRequestError("max_tokens is null; give a number of at least 1 or leave it out")
            if value is not None:
                values[BY_NAME[name].target][name] = BY_NAME[name].read(name, value)
        elif name in STRUCTURED_NAMES:
            structured_values[name] = value
        elif name in UNSUPPORTED:
            _check_neutral(UNSUPPORTED[name], value)
        else:
            _refuse_unknown(name)
    if values["request"].get("seed") == -1:  # vLLM writes "no seed" as -1 too
        values["request"]["seed"] = None
    params = RequestParams(**values["request"], structured_output=read_structured_output(structured_values))
    params.check(vocab_size)
    scheduling = SchedulingParams(**values["scheduling"])
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


# ---- names that have no effect -------------------------------------------------------------------------------------


def _check_neutral(unsupported: Unsupported, value: Any) -> None:
    if value is None:
        return
    name, value = unsupported.name, read_structure(unsupported.name, value)
    if any(equals(value, neutral) for neutral in unsupported.neutral):
        return
    if unsupported.remedy:
        raise InvalidRequestError(f"{name} is not supported (got {show(value)}); {unsupported.remedy}")
    choices = " or ".join(json.dumps(neutral) for neutral in unsupported.neutral if neutral != "")
    only = f", only {choices} is accepted" if choices else ""
    raise InvalidRequestError(f"{name} is not supported yet (got {show(value)}{only}); remove it")


def _refuse_unknown(name: str) -> None:
    known = [*BY_NAME, *STRUCTURED_NAMES, *UNSUPPORTED]
    close = difflib.get_close_matches(name, known, n=1) if len(name) <= MAX_SHOWN else []
    hint = f"; did you mean {close[0]!r}?" if close else "; remove it"
    raise InvalidRequestError(f"unknown sampling parameter {show(name)}{hint}")
