"""The wire of TensorRT-LLM's `ensemble` and `tensorrt_llm_bls` models, translated into our own.

One tensor a parameter, each with a batch dimension in front ([1, 1], [1, n]). What has a meaning here is renamed; what
has none is accepted at the values that ask for nothing and refused by name at any other. Checking values is
`front_end.wire.protocol`'s work, as for every request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.front_end.wire.json_values import show
from cb_backend.front_end.wire.parameters import BY_TENSOR, UNSUPPORTED_TENSORS, Parameter
from cb_backend.front_end.wire.protocol import GenerateRequest, make_request

SAME_INPUTS = ("text_input", "stream", "return_num_input_tokens", "return_num_output_tokens")
# Kind of grammar -> entry of `structured_outputs`.
_GUIDES = {"json": "json_object", "json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}
_GUIDE_INPUTS = ("guided_decoding_guide_type", "guided_decoding_guide")
_LORA_INPUTS = ("lora_task_id", "lora_weights", "lora_config")
OTHER_INPUTS = (*_GUIDE_INPUTS, "end_id", "pad_id", "exclude_input_in_output")  # of no single parameter


def parse_trtllm_request(
    inputs: Mapping[str, NDArray[Any]], vocab_size: int, is_input_excluded: bool = False
) -> GenerateRequest:
    """Check one request. Raises `InvalidRequestError` for whatever a client can send.

    inputs: arrays by name, with or without the batch dimension; strings are object arrays of bytes.
    is_input_excluded: what a request means that does not send `exclude_input_in_output`.
    """
    ours: dict[str, NDArray[Any]] = {}
    sampling: dict[str, Any] = {}
    for name, array in inputs.items():
        if name in SAME_INPUTS:
            ours[name] = array
        elif name in UNSUPPORTED_TENSORS:
            _check_neutral(name, array)
        elif name in BY_TENSOR:
            _take(sampling, BY_TENSOR[name], name, array)
        elif name not in OTHER_INPUTS:
            raise InvalidRequestError(f"unknown input {name!r}; remove it")
    if not any(name in sampling for name in ("temperature", "top_k", "top_p")):  # as TensorRT-LLM has it
        sampling["temperature"] = 0.0
    if "end_id" in inputs:
        sampling.update(_end(_single("end_id", inputs["end_id"])))
    if guide := _guide(*(_text(name, inputs) for name in _GUIDE_INPUTS)):
        sampling["structured_outputs"] = guide
    is_stream = "stream" in inputs and bool(np.asarray(inputs["stream"]).any())
    if not is_stream:  # a stream never repeats the prompt, whatever this says
        default = np.array([is_input_excluded])
        ours["exclude_input_in_output"] = inputs.get("exclude_input_in_output", default)
    return make_request(ours, sampling, vocab_size)


def _take(sampling: dict[str, Any], parameter: Parameter, tensor: str, array: NDArray[Any]) -> None:
    is_text = parameter.tensor_type == "TYPE_STRING"
    value = _words(tensor, array) if is_text else _single(tensor, array)
    if (parameter.is_off_at_zero or is_text) and not value:
        return
    if sampling.setdefault(parameter.name, value) != value:
        raise InvalidRequestError(f"input {tensor!r} contradicts its other name; send one of them")


def _end(end_id: int) -> dict[str, Any]:
    """The client's end token takes the place of the model's; a negative one: no token ends the answer."""
    return {"ignore_eos": True, **({"stop_token_ids": [end_id]} if end_id >= 0 else {})}


def _guide(kind: str, text: str) -> dict[str, Any]:
    """The grammar of a request as `structured_outputs` has it; empty for none."""
    if not kind and not text:
        return {}
    if kind not in _GUIDES:
        raise InvalidRequestError(
            f"input 'guided_decoding_guide_type' is {show(kind)}, which is not supported; use {', '.join(_GUIDES)}"
        )
    if kind != "json" and not text:
        raise InvalidRequestError(f"input 'guided_decoding_guide' is missing; send the {kind}")
    return {_GUIDES[kind]: text if kind != "json" else True}


def _text(name: str, inputs: Mapping[str, NDArray[Any]]) -> str:
    """A string input; empty where it is not given."""
    if name not in inputs:
        return ""
    return "".join(_texts(name, np.asarray([_single(name, inputs[name])], dtype=np.object_)))


def _single(name: str, array: NDArray[Any]) -> Any:
    if array.size != 1:
        raise InvalidRequestError(f"input {name!r} must have exactly one element, got shape {list(array.shape)}")
    value = array.reshape(-1)[0]
    return value.item() if isinstance(value, np.generic) else value


def _words(name: str, array: NDArray[Any]) -> list[str] | str:
    """Strings of a [1, n] tensor; empty ones fill it up and mean nothing. One alone may be JSON text of a list."""
    words = _texts(name, array)
    return words[0] if len(words) == 1 else words


def _texts(name: str, array: NDArray[Any]) -> list[str]:
    try:
        return [bytes(word).decode() for word in array.reshape(-1) if word]
    except (UnicodeDecodeError, TypeError):
        raise InvalidRequestError(f"input {name!r} must hold UTF-8 strings") from None


def _check_neutral(name: str, array: NDArray[Any]) -> None:
    for value in array.reshape(-1).tolist():
        _, neutral = UNSUPPORTED_TENSORS[name]
        if value not in neutral:
            only = " or ".join(repr(v) for v in neutral if v != b"")
            remedy = f"leave it out, or send {only}" if only else "leave it out"
            if name in _LORA_INPUTS:
                remedy += "; an adapter is named, by 'lora_name'"
            raise InvalidRequestError(f"input {name!r} is not supported (got {show(value)}); {remedy}")
