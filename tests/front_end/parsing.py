"""How tests have a request parsed: what of it the front end takes, and in which words it is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.request_params import RequestParams
from cb_backend.front_end.wire.protocol import GenerateRequest, parse_request

VOCAB_SIZE = 500


def text_array(*values: bytes, shape: tuple[int, ...] | None = None) -> np.ndarray:
    array = np.array(values, dtype=np.object_)
    return array if shape is None else array.reshape(shape)


def flag(value: bool) -> np.ndarray:
    return np.array([value])


def parse(parameters: str = "", **inputs: np.ndarray) -> GenerateRequest:
    return parse_request({"text_input": text_array(b"hi"), **inputs}, parameters, VOCAB_SIZE)


def params(values: Any) -> RequestParams:
    """The sampling parameters that this JSON value gives."""
    return parse(sampling_parameters=text_array(json.dumps(values).encode())).params


def refusal(values: Any) -> str:
    text = values if isinstance(values, bytes) else json.dumps(values).encode()
    with pytest.raises(InvalidRequestError) as caught:
        parse(sampling_parameters=text_array(text))
    assert len(str(caught.value)) < 400
    return str(caught.value)
