"""The parameters of a request: ONE table that both wires, the reference page and the tests of config.pbtxt read.

A row is a field of `GivenParameters`: its name (vLLM's, and that of the field that takes the value), its type in
Python, how a client's value is read, a line for the reference, and the tensors of TensorRT-LLM's models that carry it.
Ranges stand with the fields that take the values (`token_rules.BOUNDS` and the `check` of each type).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal

from cb_backend.contracts.request_params import MAX_STOP_STRINGS
from cb_backend.contracts.token_rules import MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORDS, MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS
from cb_backend.front_end.wire.json_values import (
    read_biases,
    read_bool,
    read_float,
    read_int,
    read_strings,
    read_text,
    read_token_ids,
)

Reader = Callable[[str, Any], Any]  # of a name and a client's value; raises `InvalidRequestError`
Target = Literal["request", "scheduling"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, read into a field of its own name."""

    read: Reader
    text: str  # what it does, for the reference page
    tensors: tuple[str, ...] = ()  # TensorRT-LLM's: today's name first, then older ones
    tensor_type: str = ""  # of these, in config.pbtxt
    is_off_at_zero: bool = False  # in TensorRT-LLM
    target: Target = "request"  # `RequestParams` or `SchedulingParams`
    name: str = ""  # of the field that it marks


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A parameter that asks for what is not built here: taken at values that ask for nothing, else refused by name."""

    name: str
    neutral: tuple[Any, ...] = ()  # beside null
    remedy: str = ""  # instead of "remove it"


_INT, _FLOAT, _STRINGS = "TYPE_INT32", "TYPE_FP32", "TYPE_STRING"


def _given(*row: Any, **others: Any) -> Any:
    """A field of `GivenParameters` and its row: arguments as `Parameter` takes them."""
    return field(default=None, metadata={_ROW: Parameter(*row, **others)})


_ROW = "row"
_scheduled = partial(_given, target="scheduling")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenParameters:
    """What a client may give with a request, by vLLM's names; None: left out. Each field is a row of the table."""

    max_tokens: int | None = _given(
        read_int,
        "most tokens of the answer; not given: 16, or with structured output all that the prompt leaves room for",
        ("max_tokens",),
        _INT,
    )
    min_tokens: int | None = _given(
        read_int, "the answer does not end before so many tokens", ("min_tokens", "min_length"), _INT
    )
    temperature: float | None = _given(read_float, "how freely tokens are drawn; 0 = greedy", ("temperature",), _FLOAT)
    top_p: float | None = _given(
        read_float,
        "only the fewest likeliest tokens that reach this probability, above 0; 1 = off",
        ("top_p",),
        _FLOAT,
        is_off_at_zero=True,
    )
    top_k: int | None = _given(
        read_int, "only the k likeliest tokens; 0 or -1 = off", ("top_k",), _INT, is_off_at_zero=True
    )
    min_p: float | None = _given(
        read_float, "only tokens of at least this share of the likeliest one's probability; 0 = off"
    )
    seed: int | None = _given(
        read_int,
        "the same seed gives the same answer; not given or -1: one is drawn",
        ("seed", "random_seed"),
        "TYPE_UINT64",
    )
    n: int | None = _given(
        read_int,
        "so many answers, each an element of every output; above 1 with a temperature only",
        ("num_return_sequences",),
        _INT,
    )
    stop: str | list[str] | None = _given(
        partial(read_strings, most=MAX_STOP_STRINGS),
        f"a string, or a list of at most {MAX_STOP_STRINGS}, at which the answer ends",
        ("stop_words",),
        _STRINGS,
    )
    stop_token_ids: list[int] | None = _given(
        partial(read_token_ids, most=MAX_STOP_TOKEN_IDS),
        f"at most {MAX_STOP_TOKEN_IDS} token ids that end the answer beside the model's own",
    )
    ignore_eos: bool | None = _given(read_bool, "the model's own end tokens do not end the answer")
    include_stop_str_in_output: bool | None = _given(read_bool, "what ended the answer is part of its text")
    skip_special_tokens: bool | None = _given(read_bool, "false: special tokens are shown as they are written")
    spaces_between_special_tokens: bool | None = _given(read_bool, "false: no space between added tokens in a row")
    truncate_prompt_tokens: int | None = _given(
        read_int, "only so many tokens at the prompt's end count; -1: as many as fit"
    )
    logprobs: int | None = _given(
        read_int, "with return_logprobs: so many of the likeliest tokens beside each chosen one"
    )
    prompt_logprobs: int | None = _given(
        read_int, "the same for each token of the prompt, in the output prompt_logprobs"
    )
    presence_penalty: float | None = _given(
        read_float, "taken from the logit of each token that the answer holds", ("presence_penalty",), _FLOAT
    )
    frequency_penalty: float | None = _given(
        read_float, "the same, times how often it holds it", ("frequency_penalty",), _FLOAT
    )
    repetition_penalty: float | None = _given(
        read_float,
        "above 1: what prompt and answer hold gets less likely; 0.01 at least",
        ("repetition_penalty",),
        _FLOAT,
    )
    logit_bias: dict[int, float] | None = _given(
        partial(read_biases, most=MAX_LOGIT_BIASES),
        f"an object of at most {MAX_LOGIT_BIASES} token ids, and what (-100 to 100) is added to their logits",
    )
    allowed_token_ids: list[int] | None = _given(
        partial(read_token_ids, most=MAX_ALLOWED_TOKEN_IDS, least=1),
        f"only these token ids, at most {MAX_ALLOWED_TOKEN_IDS}, can come; not empty",
    )
    bad_words: str | list[str] | None = _given(
        partial(read_strings, most=MAX_BAD_WORDS),
        f"a string, or a list of at most {MAX_BAD_WORDS}, that must not come",
        ("bad_words",),
        _STRINGS,
    )
    lora_name: str | None = _given(
        read_text, "an adapter of the model's multi_lora.json; not given: the model as it is", ("lora_name",), _STRINGS
    )
    priority: int | None = _scheduled(read_int, "lower starts earlier; one priority is served in order of arrival")
    timeout_ms: int | None = _scheduled(read_int, "the request ends with UNAVAILABLE after so long")
    queue_timeout_ms: int | None = _scheduled(read_int, "the same, if it has not started by then")
    tenant: str | None = _scheduled(read_text, "requests of one priority start in turns of their tenants")
    cache_salt: str | None = _scheduled(read_text, "cached prefixes are shared only between requests of one salt")


PARAMETERS: tuple[Parameter, ...] = tuple(
    replace(each.metadata[_ROW], name=each.name) for each in fields(GivenParameters)
)
BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}
BY_TENSOR = {tensor: parameter for parameter in PARAMETERS for tensor in parameter.tensors}

# vLLM's names.
UNSUPPORTED = {
    each.name: each
    for each in (
        Unsupported("best_of", (1,), "use n and choose, by the output cumulative_logprob"),
        Unsupported("length_penalty", (1.0,)),
        Unsupported("early_stopping", (False,)),
        Unsupported("use_beam_search", (False,)),
        Unsupported("flat_logprobs", (False,)),
        Unsupported("logprob_token_ids"),
        Unsupported("logits_processors", ([],)),
        Unsupported("guided_decoding_backend", ("auto", "guidance")),
        Unsupported("guided_whitespace_pattern", ("",)),
        Unsupported("detokenize", (True,)),
        Unsupported("thinking_token_budget"),
        Unsupported("extra_args", ({},)),
    )
}

# TensorRT-LLM's tensors: type, and the values that ask for nothing. Empty strings and empty tensors never ask.
# NOTE: weights come from the model's own folder alone, so a client can neither send any nor ask by a number for some.
UNSUPPORTED_TENSORS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "beam_width": (_INT, (1,)),
    "length_penalty": (_FLOAT, (0.0, 1.0)),
    "return_log_probs": ("TYPE_BOOL", (False,)),
    "return_context_logits": ("TYPE_BOOL", (False,)),
    "return_generation_logits": ("TYPE_BOOL", (False,)),
    "return_perf_metrics": ("TYPE_BOOL", (False,)),
    "num_draft_tokens": (_INT, (0,)),
    "use_draft_logits": ("TYPE_BOOL", (False,)),
    "lora_task_id": ("TYPE_UINT64", (0,)),
    "lora_weights": ("TYPE_FP16", ()),
    "lora_config": (_INT, ()),
    "embedding_bias_words": (_STRINGS, (b"",)),
    "embedding_bias_weights": (_FLOAT, (0.0,)),
}
