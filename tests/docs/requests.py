"""Writes the reference page of a request's parameters out of the table that both wires read.

    python -m tests.docs.requests            # writes docs/guide/requests.md

`tests/docs/test_requests.py` holds the page equal to what this would write.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cb_backend.cli.paths import checkout_path
from cb_backend.contracts.request_params import DEFAULT_MAX_TOKENS, MAX_N, RequestParams
from cb_backend.contracts.scheduling import MAX_PRIORITY, MAX_TIMEOUT_MS, SchedulingParams
from cb_backend.contracts.token_rules import BOUNDS
from cb_backend.front_end.wire.parameters import PARAMETERS, UNSUPPORTED, UNSUPPORTED_TENSORS, Parameter
from cb_backend.serving.model_config import INPUTS, OUTPUTS

PAGE = Path("docs/guide/requests.md")

# Numbers whose range does not stand with the engine's rules.
_OTHER_BOUNDS: dict[str, tuple[float, float]] = {
    "n": (1, MAX_N),
    "truncate_prompt_tokens": (-1, BOUNDS["max_tokens"][1]),
    "priority": (-MAX_PRIORITY, MAX_PRIORITY),
    "timeout_ms": (1, MAX_TIMEOUT_MS),
    "queue_timeout_ms": (1, MAX_TIMEOUT_MS),
}

_HEAD = """# What a request can carry

<!-- Written by `python -m tests.docs.requests` out of `cb_backend/front_end/wire/parameters.py`; do not edit. -->

A request to the model `llm` has a prompt (`text_input`, `input_ids` or `messages`) and parameters. The parameters are a
JSON object in the input `sampling_parameters`, or request parameters (over HTTP: further names of the body), or both:
where both name one, the input counts. A name that is not in the tables below is refused, and so is a bad value.

- Numbers and flags may be written as text (`"0.7"`, `"true"`), lists and objects as JSON text
  (`"[\\"a\\", \\"b\\"]"`): request parameters can carry text, numbers and flags only. `null` is the default.
- In `stop` and `bad_words`, text that is JSON of a list of strings is that list; any other text is one string. The
  entries of a list are taken as they are, even where they look like JSON.
- Over HTTP `messages` is JSON text as well. The server's `infer` endpoint over HTTP answers 501 for a model that
  streams: use `generate`, `generate_stream`, or gRPC.
- A header that the server is told to forward comes as a request parameter, and is refused if its name is none of
  these.
- One more request parameter, `rest`, is not for an answer: it has a model [sleep or wake](sleep.md#from-a-client).

```
curl -s localhost:8000/v2/models/llm/generate -d '{
  "messages": "[{\\"role\\": \\"user\\", \\"content\\": \\"What is the capital of France?\\"}]",
  "max_tokens": 32, "temperature": 0}'
```
"""

_STRUCTURED = """
## Structured output

One grammar a request: `structured_outputs` (older: `guided_decoding`), an object or its JSON text with one of `json`,
`regex`, `choice`, `grammar`, `json_object`; or one of `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`,
`guided_json_object`. A JSON schema may stand in OpenAI's wrapper (`name`, `strict`, `schema`). In `llm_trtllm`:
`guided_decoding_guide_type` (`json`, `json_schema`, `regex`, `ebnf_grammar`) and `guided_decoding_guide`.

```
{"max_tokens": 64, "structured_outputs": {"json": {"type": "object", "properties": {"age": {"type": "integer"}}}}}
{"max_tokens": 16, "guided_choice": ["yes", "no"]}
```
"""


def page() -> str:
    """The page's whole text."""
    inputs = [(f"`{name}`", f"{kind.removeprefix('TYPE_')} {dims}") for name, kind, dims, _ in INPUTS]
    outputs = [(f"`{name}`", f"{kind.removeprefix('TYPE_')} {dims}") for name, kind, dims in OUTPUTS]
    tensors = [
        (f"`{name}`", kind.removeprefix("TYPE_"), " or ".join(_shown(value) for value in neutral))
        for name, (kind, neutral) in UNSUPPORTED_TENSORS.items()
    ]
    return "\n".join(
        [
            _HEAD,
            "## Parameters\n",
            _table(("parameter", "default", "range", "TensorRT-LLM's tensor", "what it does"), map(_row, PARAMETERS)),
            _STRUCTURED,
            "## Taken only where they ask for nothing\n",
            "Names of vLLM:\n",
            _table(("parameter", "values beside null", "instead"), map(_unsupported_row, UNSUPPORTED)),
            "\nTensors of TensorRT-LLM (`llm_trtllm`); empty strings and empty tensors ask for nothing either:\n",
            _table(("tensor", "type", "values"), tensors),
            "\n## Tensors of `llm`\n",
            "What each means stands in [its config.pbtxt](../../model_repository/llm/config.pbtxt).\n",
            _table(("input", "type and shape"), inputs),
            "",
            _table(("output", "type and shape"), outputs),
            "",
        ]
    )


def _row(parameter: Parameter) -> tuple[str, ...]:
    tensors = ", ".join(f"`{tensor}`" for tensor in parameter.tensors)
    return f"`{parameter.name}`", _default(parameter), _range(parameter.name), tensors, parameter.text


def _default(parameter: Parameter) -> str:
    if parameter.name == "max_tokens":
        return str(DEFAULT_MAX_TOKENS)
    value = getattr((RequestParams if parameter.target == "request" else SchedulingParams)(), parameter.name)
    return "" if value in (None, (), {}, "") and not isinstance(value, bool) else _shown(value)


def _range(name: str) -> str:
    bounds = BOUNDS.get(name) or _OTHER_BOUNDS.get(name)
    return "" if bounds is None else " to ".join(f"{bound:,}" for bound in bounds)


def _unsupported_row(name: str) -> tuple[str, ...]:
    unsupported = UNSUPPORTED[name]
    return f"`{name}`", " or ".join(_shown(value) for value in unsupported.neutral), unsupported.remedy


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return {"": '""', b"": '""'}.get(value, str(value)) if isinstance(value, str | bytes) else str(value)


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    path = checkout_path("README.md").parent / PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(), encoding="utf-8")
    print(f"wrote {path}")
