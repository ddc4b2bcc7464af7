"""The wire of embeddings, classes and scores: a request's raw inputs to a checked `PoolingRequest`.

Two forms: vllm_backend's `embedding_request`, whose answer is JSON in `text_output`; and our own `pooling`, whose
answer is a tensor of numbers. Like `protocol` it knows neither tokenizer nor server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.pooling import POOLINGS, TASKS, Activation, ModelTasks, PoolingRules, Task
from cb_backend.contracts.request_params import RequestParams
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.front_end.wire.json_values import load_json, read_bool, read_int, show
from cb_backend.front_end.wire.parameters import PARAMETERS
from cb_backend.front_end.wire.protocol import (
    decode_utf8,
    read_bytes,
    read_flag,
    read_ids,
    read_texts,
    sampling_text,
)
from cb_backend.front_end.wire.sampling_json import check_json_size, load_parameters, read_params

MAX_DOCUMENTS = 2048  # of one request
MAX_JSON_BYTES = 16 << 20  # of `embedding_request`, which holds the text
POOLING_INPUTS = ("embedding_request", "pooling")

_FLAGS = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
# Of tokens that are sampled; false asks for nothing.
_OTHER_FLAGS = ("return_logprobs", "return_cumulative_logprob", "return_stop_reason", "return_output_ids")
_INPUTS = (
    "text_input", "input_ids", "text_pair", "sampling_parameters", "stream", "exclude_input_in_output",
    *POOLING_INPUTS, *_FLAGS, *_OTHER_FLAGS,
)  # fmt: skip
_PARAMETERS = {row.name for row in PARAMETERS if row.target == "scheduling"} | {"lora_name", "truncate_prompt_tokens"}
_KEYS = ("task", "pooling", "dimensions", "normalize", "activation")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequest:
    """One request as the client meant it, with every default filled in."""

    task: Task
    rules: PoolingRules
    text: str  # or the query of `documents`; empty where `input_ids` are given
    input_ids: list[int] | None = None
    documents: tuple[str, ...] | None = None  # each is scored with the text
    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None  # of an embedding; None: all
    is_normalized: bool = True
    activation: Activation = "none"
    is_json: bool = False  # the answer is vllm_backend's
    lora_name: str = ""  # of an adapter; empty: the model as it is
    scheduling: SchedulingParams
    return_finish_reason: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False


def asks_for_pooling(inputs: Mapping[str, NDArray[Any]]) -> bool:
    """Whether one of the inputs that make a request of this kind is there and says something."""
    arrays = [np.asarray(inputs[name]).reshape(-1) for name in POOLING_INPUTS if name in inputs]
    return any(bool(element) for array in arrays for element in array)


def check_generates(tasks: ModelTasks, model: str) -> None:
    """Raise `InvalidRequestError` where a model that gives no text is asked for some."""
    if not tasks.can_generate:
        raise _not_served(model, "generate", tasks)


def parse_pooling(
    inputs: Mapping[str, NDArray[Any]], parameters: str, vocab_size: int, tasks: ModelTasks, model: str
) -> PoolingRequest:
    """Check one request. Raises `InvalidRequestError`, and nothing else, for whatever a client can send.

    inputs, parameters, vocab_size: as of `protocol.parse_request`. model: its name, for error texts.
    """
    _refuse_others(inputs)
    params, scheduling = _read_parameters(inputs, parameters, vocab_size)
    flags = {name: bool(read_flag(inputs, name)) for name in _FLAGS}
    common: dict[str, Any] = {
        "truncate_prompt_tokens": params.truncate_prompt_tokens,
        "lora_name": params.lora_name,
        "scheduling": scheduling,
        **flags,
    }
    own, theirs = (read_bytes(inputs, name) for name in ("pooling", "embedding_request"))
    if own and theirs:
        raise InvalidRequestError("inputs 'pooling' and 'embedding_request' are both given; send one of them")
    if theirs:
        return _of_embedding_request(theirs, inputs, vocab_size, tasks, model, common)
    values = _load_object("pooling", own or b"{}")
    if unknown := [key for key in values if key not in _KEYS]:
        raise InvalidRequestError(f"pooling: unknown key {show(unknown[0])}; there are {', '.join(_KEYS)}")
    asked = _read_asked(values, tasks, model)
    input_ids = read_ids(inputs, "input_ids", vocab_size)
    text = read_bytes(inputs, "text_input")
    documents = read_texts(inputs, "text_pair", MAX_DOCUMENTS)
    if (text is None) == (input_ids is None):
        raise InvalidRequestError("a request with 'pooling' has one of 'text_input' and 'input_ids'")
    if documents is not None and (asked["task"] != "score" or text is None):
        raise InvalidRequestError(
            "'text_pair' holds documents to score with the query in 'text_input'; send it with the task 'score' alone"
        )
    decoded = "" if text is None else decode_utf8("text_input", text)
    return PoolingRequest(text=decoded, input_ids=input_ids, documents=documents, **asked, **common)


def _of_embedding_request(
    data: bytes,
    inputs: Mapping[str, NDArray[Any]],
    vocab_size: int,
    tasks: ModelTasks,
    model: str,
    common: dict[str, Any],
) -> PoolingRequest:
    """vllm_backend's form: `{"input": text or token ids, "pooling_params": {"dimensions": [n]}}`."""
    values = _load_object("embedding_request", data)
    if read_bytes(inputs, "text_input"):
        raise InvalidRequestError("the text of an 'embedding_request' stands in it; leave 'text_input' empty")
    for name in ("input_ids", "text_pair"):
        if name in inputs:
            raise InvalidRequestError(f"input {name!r} does not go with 'embedding_request'; remove it")
    if unknown := [key for key in values if key not in ("input", "pooling_params")]:
        raise InvalidRequestError(f"embedding_request: unknown key {show(unknown[0])}; it has input and pooling_params")
    pooling = values.get("pooling_params") or {}
    if not isinstance(pooling, dict) or [key for key in pooling if key != "dimensions"]:
        raise InvalidRequestError(
            f"embedding_request: pooling_params must be an object with dimensions alone, got {show(pooling)}"
        )
    dimensions = pooling.get("dimensions")
    if isinstance(dimensions, list) and len(dimensions) == 1:
        dimensions = dimensions[0]
    asked = _read_asked({"task": "embed", "dimensions": dimensions}, tasks, model)
    prompt = values.get("input")
    if isinstance(prompt, str):
        return PoolingRequest(text=prompt, is_json=True, **asked, **common)
    if not isinstance(prompt, list) or not prompt or any(type(each) is not int for each in prompt):
        raise InvalidRequestError(f"embedding_request: input must be a text or a list of token ids, got {show(prompt)}")
    if (bad := next((each for each in prompt if not 0 <= each < vocab_size), None)) is not None:
        raise InvalidRequestError(f"token id {bad} in 'input' is outside the vocabulary (0 to {vocab_size - 1})")
    return PoolingRequest(text="", input_ids=prompt, is_json=True, **asked, **common)


def _refuse_others(inputs: Mapping[str, NDArray[Any]]) -> None:
    for name in inputs:
        if name not in _INPUTS:
            raise InvalidRequestError(f"input {name!r} does not go with embeddings and scores; remove it")
    for name in _OTHER_FLAGS:
        if read_flag(inputs, name):
            raise InvalidRequestError(f"{name!r} is about tokens, and embeddings and scores have none; leave it out")
    if read_flag(inputs, "exclude_input_in_output") is False:
        raise InvalidRequestError("'exclude_input_in_output' is false, but embeddings and scores hold no text")
    read_flag(inputs, "stream")  # one response in any case


def _read_parameters(
    inputs: Mapping[str, NDArray[Any]], parameters: str, vocab_size: int
) -> tuple[RequestParams, SchedulingParams]:
    """The parameters that are not about sampling; others are refused by name."""
    given = load_parameters(parameters, sampling_text(inputs))
    for name, value in given.items():
        if value is not None and name not in _PARAMETERS:
            raise InvalidRequestError(
                f"{show(name)} does not go with embeddings and scores, which have no tokens to choose; they take"
                f" {', '.join(sorted(_PARAMETERS))}"
            )
    return read_params(given, vocab_size)


def _read_asked(values: dict[str, Any], tasks: ModelTasks, model: str) -> dict[str, Any]:
    """Task, rules and what is made of the numbers, of the keys of `pooling`."""
    values = {name: value for name, value in values.items() if value is not None}
    served = tasks.tasks
    task = values.pop("task", served[0] if served else "embed")
    if task not in TASKS:
        raise InvalidRequestError(f"task must be one of {', '.join(TASKS)}, got {show(task)}")
    if task not in served:
        raise _not_served(model, task, tasks)
    pooling = values.pop("pooling", tasks.pooling if task == "embed" else "last")
    if pooling not in POOLINGS or (pooling == "mean" and task != "embed"):
        choices = " or ".join(POOLINGS) if task == "embed" else "last, with which classifiers are trained"
        raise InvalidRequestError(f"pooling must be {choices}, got {show(pooling)}")
    if task == "embed":
        asked = _embedding(values, tasks)
        rules = PoolingRules(pooling=pooling)
    else:
        asked, rules = _scores(values, tasks, task)
    if values:
        raise InvalidRequestError(f"{next(iter(values))!r} does not go with the task {task!r}; remove it")
    return {"task": task, "rules": rules, **asked}


def _embedding(values: dict[str, Any], tasks: ModelTasks) -> dict[str, Any]:
    dimensions = None if "dimensions" not in values else read_int("dimensions", values.pop("dimensions"))
    if dimensions is not None and not 1 <= dimensions <= tasks.embedding_size:
        raise InvalidRequestError(f"dimensions must be between 1 and {tasks.embedding_size}, got {dimensions}")
    if dimensions is not None and tasks.dimensions and dimensions not in (*tasks.dimensions, tasks.embedding_size):
        choices = ", ".join(map(str, tasks.dimensions))
        raise InvalidRequestError(f"dimensions of this model are {choices}, got {dimensions}")
    is_normalized = read_bool("normalize", values.pop("normalize", tasks.is_normalized))
    return {"dimensions": dimensions, "is_normalized": is_normalized}


def _scores(values: dict[str, Any], tasks: ModelTasks, task: Task) -> tuple[dict[str, Any], PoolingRules]:
    has_activation = read_bool("activation", values.pop("activation", True))
    if task == "score" and tasks.score_token_ids:
        activation: Activation = "softmax" if has_activation else "none"
        return {"activation": activation}, PoolingRules(readout="head", token_ids=tasks.score_token_ids)
    return {"activation": tasks.activation if has_activation else "none"}, PoolingRules(readout="classifier")


def _not_served(model: str, task: str, tasks: ModelTasks) -> InvalidRequestError:
    served = (*(("generate",) if tasks.can_generate else ()), *tasks.tasks)
    # Clients of vllm_backend look for the beginning.
    return InvalidRequestError(
        f"Error generating stream: Model {model} does not support '{task}' request; it serves {', '.join(served)}"
        " (runner in its model.json, and the checkpoint, say which)"
    )


def _load_object(name: str, data: bytes) -> dict[str, Any]:
    if len(data) > MAX_JSON_BYTES:
        raise InvalidRequestError(f"input {name!r} has {len(data)} bytes; at most {MAX_JSON_BYTES} are allowed")
    if name == "pooling":
        check_json_size(len(data))
    value = load_json(name, decode_utf8(name, data))
    if not isinstance(value, dict):
        raise InvalidRequestError(f"input {name!r} must be a JSON object, got {show(value)}")
    return value
