"""The wire: one server request's raw inputs to a checked `GenerateRequest`.

Inputs are plain arrays by name and the request parameters as JSON text, so that this module needs no server. It does
not know the model beyond its vocabulary's size, and neither tokenises nor sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.request_params import RequestParams
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.front_end.wire.sampling_json import check_json_size, load_parameters, read_params

# Clients of vllm_backend compare with this text.
STREAM_WITH_INPUT = "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."

_STRING_INPUTS = ("text_input", "messages", "sampling_parameters", "tokenize")
_PROMPT_INPUTS = ("text_input", "input_ids", "messages")
_FLAG_INPUTS = (
    "stream",
    "exclude_input_in_output",
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_logprobs",
    "return_cumulative_logprob",
    "return_stop_reason",
    "return_output_ids",
)
_ID_INPUTS = ("input_ids",)
# An input of vllm_backend that is not built yet, and those of requests of another kind (`pooling_request`), which are
# not here where they ask for something.
_NOT_ASKING = ("image", "embedding_request", "pooling")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request as the client meant it, with every default filled in."""

    text: str  # the prompt; empty where it is given otherwise
    params: RequestParams  # checked
    scheduling: SchedulingParams
    is_stream: bool
    is_input_prepended: bool  # the answer begins with `text`; never when streaming
    return_finish_reason: bool
    return_num_input_tokens: bool
    return_num_output_tokens: bool
    return_logprobs: bool = False
    return_cumulative_logprob: bool = False
    return_stop_reason: bool = False
    return_output_ids: bool = False
    input_ids: list[int] | None = None  # the prompt as token ids, within the vocabulary
    messages: str | None = None  # the prompt as chat messages in JSON, not looked into
    tokenize: str | None = None  # JSON options: nothing is generated, the answer is the prompt itself
    num_logprobs: int | None = None  # as the client gave `logprobs`; None: the output `logprobs` is "null"


def parse_request(
    inputs: Mapping[str, NDArray[Any]],
    parameters: str,
    vocab_size: int,
    defaults: Mapping[str, float] | None = None,
) -> GenerateRequest:
    """Check one request. Raises `InvalidRequestError`, and nothing else, for whatever a client can send.

    inputs: arrays of the inputs that are there; strings are object arrays of bytes, flags bool, each with one
        element in any shape.
    parameters: the request parameters as JSON text, empty for none. They are sampling parameters; where the input
        `sampling_parameters` names one as well, that one counts.
    vocab_size: number of token ids that the model accepts.
    defaults: sampling parameters of the model, for what the request leaves out.
    """
    given = load_parameters(parameters, sampling_text(inputs))
    return make_request(inputs, given, vocab_size, defaults)


def make_request(
    inputs: Mapping[str, NDArray[Any]],
    given: dict[str, Any],
    vocab_size: int,
    defaults: Mapping[str, float] | None = None,
) -> GenerateRequest:
    """The request of inputs as of `parse_request`, and of parameters by name. Raises `InvalidRequestError`."""
    _refuse_unsupported(inputs)
    text_bytes = read_bytes(inputs, "text_input")
    input_ids = read_ids(inputs, "input_ids", vocab_size)
    messages = read_bytes(inputs, "messages")
    tokenize = read_bytes(inputs, "tokenize")
    _check_one_prompt(inputs)
    flags = {name: read_flag(inputs, name) for name in _FLAG_INPUTS}
    is_stream = bool(flags["stream"])
    is_input_prepended = _is_input_prepended(flags["exclude_input_in_output"], is_stream, text_bytes is not None)
    params, scheduling = read_params(given, vocab_size, defaults)
    return GenerateRequest(
        text="" if text_bytes is None else decode_utf8("text_input", text_bytes),
        params=msgspec.structs.replace(
            params,
            logprobs=_logprobs_to_compute(
                params,
                bool(flags["return_logprobs"]),
                bool(flags["return_cumulative_logprob"]),
            ),
        ),
        scheduling=scheduling,
        is_stream=is_stream,
        is_input_prepended=is_input_prepended,
        return_finish_reason=bool(flags["return_finish_reason"]),
        return_num_input_tokens=bool(flags["return_num_input_tokens"]),
        return_num_output_tokens=bool(flags["return_num_output_tokens"]),
        return_logprobs=bool(flags["return_logprobs"]),
        return_cumulative_logprob=bool(flags["return_cumulative_logprob"]),
        return_stop_reason=bool(flags["return_stop_reason"]),
        return_output_ids=bool(flags["return_output_ids"]),
        input_ids=input_ids,
        messages=None if messages is None else decode_utf8("messages", messages),
        tokenize=None if tokenize is None else decode_utf8("tokenize", tokenize),
        num_logprobs=params.logprobs,
    )


def _check_one_prompt(inputs: Mapping[str, NDArray[Any]]) -> None:
    given = [name for name in _PROMPT_INPUTS if name in inputs]
    if not given:
        raise InvalidRequestError("input 'text_input' is missing (or 'input_ids', or 'messages')")
    if len(given) > 1:
        raise InvalidRequestError(f"inputs {' and '.join(map(repr, given))} are both given; send one of them")


def _is_input_prepended(is_excluded: bool | None, is_stream: bool, has_text: bool) -> bool:
    """Whether the answer begins with the prompt. Where the client says nothing: if it can, as in vllm_backend."""
    if is_excluded is None:
        return has_text and not is_stream
    if not is_excluded and is_stream:
        raise InvalidRequestError(STREAM_WITH_INPUT)
    if not is_excluded and not has_text:
        raise InvalidRequestError(
            "'exclude_input_in_output' is false, but only a prompt in 'text_input' can be repeated; leave it out"
        )
    return not is_excluded


def _logprobs_to_compute(params: RequestParams, is_list_wanted: bool, is_sum_wanted: bool) -> int | None:
    """What the engine must compute; nothing if no output would show it (as in vllm_backend, that is no error)."""
    if is_list_wanted and params.logprobs is not None:
        return params.logprobs
    return 0 if is_sum_wanted else None


def sampling_text(inputs: Mapping[str, NDArray[Any]]) -> str | None:
    """The input `sampling_parameters`, or None when it is not given."""
    sampling = read_bytes(inputs, "sampling_parameters")
    if sampling is None:
        return None
    check_json_size(len(sampling))
    if not sampling.strip():
        raise InvalidRequestError("input 'sampling_parameters' is empty; send {} or leave it out")
    return decode_utf8("sampling_parameters", sampling)


def _refuse_unsupported(inputs: Mapping[str, NDArray[Any]]) -> None:
    for name, array in inputs.items():
        if name in _NOT_ASKING:
            if any(bool(element) for element in np.asarray(array).reshape(-1)):
                raise InvalidRequestError(f"input {name!r} is not supported yet; leave it out")
        elif name == "text_pair":
            raise InvalidRequestError("input 'text_pair' goes with the input 'pooling' alone; send that too")
        elif name not in _STRING_INPUTS and name not in _FLAG_INPUTS and name not in _ID_INPUTS:
            raise InvalidRequestError(f"unknown input {name!r}; remove it")


def _single_element(name: str, array: NDArray[Any]) -> Any:
    if array.size != 1:
        raise InvalidRequestError(f"input {name!r} must have exactly one element, got shape {list(array.shape)}")
    return array.reshape(-1)[0]


def read_flag(inputs: Mapping[str, NDArray[Any]], name: str) -> bool | None:
    """The flag's value, or None when it is not given."""
    if name not in inputs:
        return None
    array = np.asarray(inputs[name])
    if array.dtype != np.bool_:
        raise InvalidRequestError(f"input {name!r} must be of type BOOL, got an array of {array.dtype}")
    return bool(_single_element(name, array))


def read_bytes(inputs: Mapping[str, NDArray[Any]], name: str) -> bytes | None:
    """The string's bytes, or None when it is not given."""
    if name not in inputs:
        return None
    array = np.asarray(inputs[name])
    if array.dtype != np.object_:
        raise InvalidRequestError(f"input {name!r} must be of type BYTES, got an array of {array.dtype}")
    element = _single_element(name, array)
    if not isinstance(element, bytes):
        raise InvalidRequestError(f"input {name!r} must hold bytes, got {type(element).__name__}")
    return element


def read_ids(inputs: Mapping[str, NDArray[Any]], name: str, vocab_size: int) -> list[int] | None:
    """Token ids in any shape, or None when they are not given."""
    if name not in inputs:
        return None
    array = np.asarray(inputs[name])
    if array.dtype != np.int32:
        raise InvalidRequestError(f"input {name!r} must be of type INT32, got an array of {array.dtype}")
    if array.size == 0:
        raise InvalidRequestError(f"input {name!r} is empty; send at least one token id")
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0 or highest >= vocab_size:
        bad = lowest if lowest < 0 else highest
        raise InvalidRequestError(f"token id {bad} in {name!r} is outside the vocabulary (0 to {vocab_size - 1})")
    ids: list[int] = array.reshape(-1).tolist()
    return ids


def read_texts(inputs: Mapping[str, NDArray[Any]], name: str, most: int) -> tuple[str, ...] | None:
    """One text or more, in any shape, or None when they are not given."""
    if name not in inputs:
        return None
    array = np.asarray(inputs[name]).reshape(-1)
    if array.dtype != np.object_ or not all(isinstance(element, bytes) for element in array):
        raise InvalidRequestError(f"input {name!r} must be of type BYTES, got an array of {array.dtype}")
    if not 1 <= array.size <= most:
        raise InvalidRequestError(f"input {name!r} has {array.size} elements; 1 to {most} are possible")
    return tuple(decode_utf8(name, element) for element in array)


def decode_utf8(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"input {name!r} is not valid UTF-8: {error.reason} at byte {error.start}") from None
