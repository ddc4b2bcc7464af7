"""Requests that know the grammar of the wire, and break it: a valid one, then one to four mutations.

Request `index` of a seed is always the same, whatever was made before it. Nothing here knows how requests are sent.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORDS = ["the", "quick", "fox", "東京", "Grüße", "🙂", "def add(a, b):", "\x00", "\u202e", "<|endoftext|>", "\n", "é"]
FLAGS = ["stream", "exclude_input_in_output", "return_finish_reason", "return_logprobs", "return_cumulative_logprob"]
FLAGS += ["return_num_input_tokens", "return_num_output_tokens", "return_stop_reason", "return_output_ids"]
OTHER_INPUTS = ["tokenize", "image", "embedding_request", "TEXT_INPUT", "text_input\x00", "priority", "", "x" * 300]
OTHER_INPUTS += ["__class__"]

# Values that somebody once sent somewhere. No text in it looks like what an error must not show.
HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf, 2**31 - 1, 2**31, 2**63,
    2**64, 2**64 - 1, -(2**63), 10**39, 10**400, "", " ", "0", "-1", "1e5", "1e999", "nan", "Infinity", "0x10", "1_000",
    "٣", "\uff11\uff12", "true", "null", "\ud800", "\x00", "\u202e", "a" * 2000, "%s%n{0}{x}", "'; drop table",
    "\r\n\r\n", [], {}, [[]], [None], [1, "1", 1.0], [True], ["a"] * 40, [0] * 70, {"a": 1}, {"": None}, {"0": 1},
    {"-1": 1}, {"99999999": 1}, {"0": math.nan}, {"0": "x"}, {str(i): 1 for i in range(310)}, [[["deep"] * 3] * 3] * 3,
]  # fmt: skip

VALID: dict[str, Callable[[random.Random], Any]] = {
    "max_tokens": lambda draw: draw.choice([1, 2, 4, "3", 4.0]),
    "min_tokens": lambda draw: draw.choice([0, 1, 2]),
    "temperature": lambda draw: draw.choice([0, 0.7, 1, "0.9", 2, 1e-6]),
    "top_k": lambda draw: draw.choice([-1, 0, 1, 40, 10**7]),
    "top_p": lambda draw: draw.choice([1, 0.9, 1e-6, "0.5"]),
    "min_p": lambda draw: draw.choice([0, 0.1, 1]),
    "seed": lambda draw: draw.choice([None, -1, 0, 7, 2**64 - 1]),
    "n": lambda draw: draw.choice([1, 1, 1, 2, 3]),
    "best_of": lambda draw: draw.choice([None, 1]),
    "stop": lambda draw: draw.choice([None, "x", ["the", "é"], [], ["\n"]]),
    "stop_token_ids": lambda draw: draw.choice([[], [0], [5, 6, "7"]]),
    "ignore_eos": lambda draw: draw.choice([True, False, "true", 0]),
    "include_stop_str_in_output": lambda draw: draw.choice([True, False]),
    "skip_special_tokens": lambda draw: draw.choice([True, False]),
    "spaces_between_special_tokens": lambda draw: draw.random() < 0.5,
    "truncate_prompt_tokens": lambda draw: draw.choice([None, -1, 1, 20]),
    "logprobs": lambda draw: draw.choice([None, 0, 1, 5, "2"]),
    "prompt_logprobs": lambda draw: draw.choice([None, None, 0, 2]),
    "presence_penalty": lambda draw: draw.choice([0, 1.5, -2]),
    "frequency_penalty": lambda draw: draw.choice([0, "0.5", 2]),
    "repetition_penalty": lambda draw: draw.choice([1, 1.3, 0.5]),
    "logit_bias": lambda draw: draw.choice([{}, {"5": 3}, {"0": -100, "7": 100}]),
    "allowed_token_ids": lambda draw: draw.choice([None, [1, 2, 3], [0]]),
    "bad_words": lambda draw: draw.choice([[], ["fox"], "the", ["東京", "é"]]),
    "guided_json": lambda draw: None,
    "structured_outputs": lambda draw: None,
    "guided_choice": lambda draw: draw.choice([None, []]),
    "lora_name": lambda draw: draw.choice([None, ""]),
    "priority": lambda draw: draw.choice([0, -3, "5"]),
    "timeout_ms": lambda draw: draw.choice([None, 60000]),
    "queue_timeout_ms": lambda draw: draw.choice([None, 60000]),
    "cache_salt": lambda draw: draw.choice([None, "", "tenant"]),
}


@dataclass
class FuzzedRequest:
    """What a client sends: arrays by input name, and request parameters as JSON text."""

    inputs: dict[str, NDArray[Any]] = field(default_factory=dict)
    parameters: str = ""


def make_request(seed: int, index: int) -> FuzzedRequest:
    """One request of the endless list that a seed stands for."""
    draw = random.Random(seed * 1_000_003 + index)
    request = _valid(draw)
    for _ in range(draw.choice([1, 1, 1, 1, 2, 3, 4])):
        draw.choice(_MUTATIONS)(request, draw)
    return request


def _valid(draw: random.Random) -> FuzzedRequest:
    request = FuzzedRequest()
    kind = draw.random()
    if kind < 0.75:
        request.inputs["text_input"] = text_array(" ".join(draw.choices(WORDS, k=draw.randint(1, 12))).encode())
    elif kind < 0.95:
        request.inputs["input_ids"] = np.array([draw.randrange(384) for _ in range(draw.randint(1, 40))], np.int32)
    else:
        turns = [{"role": draw.choice(["user", "system"]), "content": draw.choice(WORDS)} for _ in range(2)]
        request.inputs["messages"] = text_array(json.dumps(turns).encode())
    for name in draw.sample(FLAGS, draw.randint(0, 4)):
        request.inputs[name] = np.array([draw.random() < 0.7])
    params = {"max_tokens": 2} | {name: VALID[name](draw) for name in draw.sample(sorted(VALID), draw.randint(0, 5))}
    if draw.random() < 0.8:
        request.inputs["sampling_parameters"] = text_array(json.dumps(params).encode())
    else:
        request.parameters = json.dumps({key: value for key, value in params.items() if not _is_nested(value)})
    return request


def _is_nested(value: Any) -> bool:
    return value is None or isinstance(value, list | dict)  # request parameters are scalars


def text_array(data: bytes) -> NDArray[Any]:
    return np.array([data], dtype=object)


# ---- mutations ------------------------------------------------------------------------------------------------------


def _sampling(request: FuzzedRequest) -> bytes | None:
    array = request.inputs.get("sampling_parameters")
    if array is None or array.dtype != object or array.size != 1:
        return None
    element = array.reshape(-1)[0]
    return element if isinstance(element, bytes) else None


def _change_params(request: FuzzedRequest, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the parameters as an object; nothing where they are no object any more."""
    data = _sampling(request)
    text = request.parameters if data is None else data
    try:
        params = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return
    if not isinstance(params, dict):
        return
    change(params)
    if data is None:
        request.parameters = json.dumps({key: value for key, value in params.items() if not _is_nested(value)})
    else:
        request.inputs["sampling_parameters"] = text_array(_dumps(params))


def _dumps(value: Any) -> bytes:
    return json.dumps(value).encode()


def _within_the_grammar(request: FuzzedRequest, draw: random.Random) -> None:
    """Another valid value, the same text written differently, a flag more."""
    name = draw.choice(sorted(VALID))
    _change_params(request, lambda params: params.update({name: VALID[name](draw)}))
    data = _sampling(request)
    if data is not None and draw.random() < 0.5:
        spaced = data.replace(b": ", b" :\t").replace(b", ", b"\r\n,")
        request.inputs["sampling_parameters"] = text_array(draw.choice([spaced, b"\n" + data + b" ", data]))
    request.inputs[draw.choice(FLAGS[2:])] = np.array([draw.random() < 0.5])


def _hostile_value(request: FuzzedRequest, draw: random.Random) -> None:
    _change_params(request, lambda params: params.update({draw.choice(sorted(VALID)): draw.choice(HOSTILE)}))


def _other_name(request: FuzzedRequest, draw: random.Random) -> None:
    name = draw.choice(sorted(VALID))
    at = draw.randrange(len(name))
    other = draw.choice(
        [name.upper(), name[:-1], name + "s", name[:at] + name[at + 1 :], name.replace("_", "-"), " " + name, "",
         "__class__", "\u0430" + name[1:], name * 50, "num_answers", "bad_words_token_ids", "\ud800", name + "\x00"]
    )  # fmt: skip
    _change_params(request, lambda params: params.update({other: VALID[name](draw)}))


def _broken_text(request: FuzzedRequest, draw: random.Random) -> None:
    """The JSON text, as bytes: cut, flipped, doubled, buried."""
    data = _sampling(request) or b'{"max_tokens": 2}'
    at = draw.randrange(len(data) + 1)
    noise = bytes(draw.randrange(256) for _ in range(draw.randint(1, 4)))
    key = draw.choice(sorted(VALID)).encode()
    choices: list[bytes] = [
        data[:at], data[at:], data[:at] + noise + data[at:], data[:at] + noise + data[at + 1 :], data + data, noise,
        b"\xef\xbb\xbf" + data, b" " * 5000 + data, b"[" * 3000, b'{"a":' * 3000,
        b'{"' + key + b'": 1, "' + key + b'": 2}', b'{"stop": "\\ud83d"}', b'{"seed": ' + b"9" * 600 + b"}",
        b"null", b"[]", b'"text"', b"", b" ", b"{}", b"{'max_tokens': 1}", b'{"max_tokens": 1,}',
        data.replace(b'"', b"'"), data.decode(errors="replace").encode("utf-16"),
    ]  # fmt: skip
    request.inputs["sampling_parameters"] = text_array(draw.choice(choices))


def _prompt(request: FuzzedRequest, draw: random.Random) -> None:
    """Another prompt, several of them, or none."""
    noise = bytes(draw.randrange(256) for _ in range(draw.randint(1, 30)))
    prompts: list[tuple[str, NDArray[Any]]] = [
        ("text_input", text_array(noise)),
        ("text_input", text_array(b"")),
        ("text_input", text_array(b"ab " * draw.choice([10, 1000, 20000]))),
        ("text_input", text_array("\u0301\u200d🙂".encode() * draw.randint(1, 50))),
        ("input_ids", np.array([], np.int32)),
        ("input_ids", np.array([draw.choice([-1, 0, 383, 384, 2**31 - 1, -(2**31)])] * draw.randint(1, 200), np.int32)),
        ("messages", text_array(_dumps(draw.choice(HOSTILE)))),
        ("messages", text_array(_dumps([{"role": draw.choice(HOSTILE), "content": draw.choice(HOSTILE)}]))),
        ("messages", text_array(b"[" * 2000)),
    ]
    if draw.random() < 0.8:
        for name in ("text_input", "input_ids", "messages"):
            request.inputs.pop(name, None)
    if draw.random() < 0.9:
        name, value = draw.choice(prompts)
        request.inputs[name] = value


def _tensor(request: FuzzedRequest, draw: random.Random) -> None:
    """One input of another type, shape or name."""
    name = draw.choice([*request.inputs, *FLAGS, *OTHER_INPUTS, "text_input", "sampling_parameters"])
    array = request.inputs.get(name, np.array([True]))
    tensors: list[NDArray[Any]] = [
        np.array([draw.random() < 0.5]), np.array([1], np.int32), np.array([1.5], np.float32), np.array([3], np.int64),
        array[:0], np.concatenate([array, array]), array.reshape(1, -1), np.array([b"true"], dtype=object),
        np.array([b""], dtype=object), np.zeros((0, 3), np.int32),
    ]  # fmt: skip
    request.inputs[name] = draw.choice(tensors)


_MUTATIONS = (
    [_within_the_grammar] * 8
    + [_hostile_value] * 5
    + [_other_name] * 2
    + [_broken_text] * 3
    + [_prompt] * 2
    + [_tensor] * 2
)
