"""The two endpoints that generate: bodies read, and the answers that they will have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from cb_backend.gateway.answers import ChatChoice, CompletionChoice
from cb_backend.gateway.bodies import Body, write_json
from cb_backend.gateway.calls import Prompt, make_inputs
from cb_backend.gateway.errors import bad_request
from cb_backend.gateway.parsers import Reading
from cb_backend.gateway.sampling import (
    answer_form,
    patterns_of,
    take_chat_logprobs,
    take_completion_logprobs,
    take_sampling,
)
from cb_backend.gateway.tool_choice import ToolChoice, take_tools
from cb_backend.gateway.triton import Model

MAX_PROMPTS = 128  # of one completion
MAX_ANSWERS = 64  # to each
Choice = ChatChoice | CompletionChoice


@dataclass(slots=True)
class Generation:
    """A checked request: what goes to the server, and its choices, n of each prompt, in the prompts' order."""

    object: str  # of whole answers, as OpenAI names it
    is_stream: bool
    wants_usage: bool  # at a stream's end
    num_answers: int  # of each prompt
    shows_prompt_logprobs: bool = False
    inputs: list[dict[str, Any]] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)

    @property
    def chunk_object(self) -> str:
        return "chat.completion.chunk" if self.object == "chat.completion" else self.object

    def whole(self, prompt_logprobs: dict[int, str]) -> dict[str, Any]:
        """The choices, which have ended. `prompt_logprobs`: JSON by the prompt's number; a completion shows it in each
        choice of the prompt and a chat beside its choices, as vLLM does."""
        answer: dict[str, Any] = {"choices": [choice.whole() for choice in self.choices]}
        if self.shows_prompt_logprobs:
            figures = {number: msgspec.Raw(text.encode()) for number, text in prompt_logprobs.items()}
            if self.object == "chat.completion":
                answer["prompt_logprobs"] = figures.get(0)
            else:
                for index, choice in enumerate(answer["choices"]):
                    choice["prompt_logprobs"] = figures.get(index // self.num_answers)
        return answer


def read_chat(body: Body, model: Model, reading: Reading) -> Generation:
    """Of `/v1/chat/completions`. Raises `ApiError`."""
    if not model.takes_chat:
        raise bad_request(f"the model {model.name!r} has no input 'messages'; use /v1/completions", "model")
    generation = _begin(body, model, "chat.completion")
    choice = take_tools(body)
    prompt = Prompt("messages", messages_input(body, choice))
    body.refuse("modalities", "answers are text", (["text"],))
    body.refuse("audio", "answers are text")
    body.refuse("prediction", "there are no drafts from clients", ())
    num_logprobs = take_chat_logprobs(body)
    sampling = take_sampling(body, is_chat=True)
    if choice.is_forced:
        if "structured_outputs" in sampling:
            raise bad_request("a tool that must be called leaves no room for 'response_format'", "response_format")
        sampling["structured_outputs"] = {"json": choice.schema()}
    elif form := answer_form(sampling):
        reading, choice = reading.of_form(patterns_of(form)), ToolChoice()
    if reading.needs_control_tokens(choice):
        sampling["skip_special_tokens"] = False
    _add(generation, [prompt], sampling, num_logprobs)
    generation.choices = [
        ChatChoice(index, reading.parser(choice), num_logprobs) for index in range(generation.num_answers)
    ]
    return generation


def read_completion(body: Body, model: Model) -> Generation:
    """Of `/v1/completions`. Raises `ApiError`."""
    generation = _begin(body, model, "text_completion")
    prompts = _prompts(body, model)
    body.refuse("suffix", "the model continues a text and does not fill gaps", ("",))
    if body.take("best_of", int) not in (None, generation.num_answers):
        raise bad_request("'best_of' is not supported beyond 'n': use n and choose", "best_of")
    has_echo = body.take("echo", bool) or False
    if has_echo and any(prompt.tensor == "input_ids" for prompt in prompts):
        raise bad_request("'echo' repeats a text; of token ids the gateway does not know it", "echo")
    num_logprobs = take_completion_logprobs(body)
    if has_echo and num_logprobs is not None:
        raise bad_request("'echo' with 'logprobs' is not supported; 'prompt_logprobs' shows the prompt's", "echo")
    sampling = take_sampling(body, is_chat=False)
    _add(generation, prompts, sampling, num_logprobs)
    for prompt in prompts:
        before = prompt.value if has_echo and isinstance(prompt.value, str) else ""
        for _ in range(generation.num_answers):
            generation.choices.append(CompletionChoice(len(generation.choices), before, num_logprobs))
    return generation


def _begin(body: Body, model: Model, name: str) -> Generation:
    is_stream, number = body.take("stream", bool) or False, body.take("n", int)
    options = body.take("stream_options", dict)
    if options is not None and not is_stream:
        raise bad_request("'stream_options' needs 'stream': true", "stream_options")
    wants_usage = _wants_usage(Body(options or {}))
    shows_prompt_logprobs = body.left.get("prompt_logprobs") is not None  # how many is the model's to check
    if shows_prompt_logprobs and is_stream:
        raise bad_request("'prompt_logprobs' come with whole answers only: send 'stream': false", "prompt_logprobs")
    if shows_prompt_logprobs and "prompt_logprobs" not in model.outputs:
        raise bad_request(f"the model {model.name!r} has no output 'prompt_logprobs'; leave it out", "prompt_logprobs")
    number = 1 if number is None else number
    if not 1 <= number <= MAX_ANSWERS:
        raise bad_request(f"'n' is {number}; it must be 1 to {MAX_ANSWERS}", "n")
    return Generation(name, is_stream, wants_usage, number, shows_prompt_logprobs)


def _wants_usage(options: Body) -> bool:
    """Of `stream_options`."""
    wants_usage = options.take("include_usage", bool) or False
    options.take("include_obfuscation", bool)  # padding of OpenAI's own events: no answer depends on it
    for name, value in options.left.items():
        if value is not False:
            reason = "there is include_usage, for one count at the stream's end; leave it out"
            raise bad_request(f"'stream_options.{name}' is not supported: {reason}", "stream_options")
    return wants_usage


def _add(generation: Generation, prompts: list[Prompt], sampling: dict[str, Any], num_logprobs: int | None) -> None:
    if generation.num_answers > 1:
        sampling["n"] = generation.num_answers
    if num_logprobs is not None:
        sampling["logprobs"] = num_logprobs
    generation.inputs = [
        make_inputs(
            prompt,
            sampling,
            is_stream=generation.is_stream,
            has_logprobs=num_logprobs is not None,
            has_usage=generation.wants_usage or not generation.is_stream,
        )
        for prompt in prompts
    ]


def messages_input(body: Body, choice: ToolChoice) -> str:
    """The input `messages`: the conversation, and what the chat template is to know beside it."""
    messages = body.need("messages", list)
    values: dict[str, Any] = dict(body.take("chat_template_kwargs", dict) or {})
    for name in ("add_generation_prompt", "continue_final_message"):
        if (flag := body.take(name, bool)) is not None:
            values[name] = flag
    if (effort := body.take("reasoning_effort", str)) is not None:
        values["reasoning_effort"] = effort
    if (documents := body.take("documents", list)) is not None:
        values["documents"] = documents
    if choice.tools:
        values["tools"] = list(choice.tools)
        if choice.is_forced:  # the answer has the call's form in any case; the template need not know tools
            values["optional"] = ["tools"]
    return write_json({**values, "messages": [_message(index, each) for index, each in enumerate(messages)]})


def _message(index: int, message: Any) -> Any:
    if not isinstance(message, dict):
        raise bad_request(f"'messages[{index}]' must be an object", "messages")
    # OpenAI's newer name of the role; chat templates know the older one.
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _prompts(body: Body, model: Model) -> list[Prompt]:
    """A text, token ids, or a list of either."""
    value = body.left.pop("prompt", None)
    if value is None:
        raise bad_request("'prompt' is missing", "prompt")
    many = value if isinstance(value, list) and not (value and isinstance(value[0], int)) else [value]
    if not 1 <= len(many) <= MAX_PROMPTS:
        raise bad_request(f"'prompt' has {len(many)} entries; 1 to {MAX_PROMPTS} are possible", "prompt")
    prompts = [_prompt(one) for one in many]
    for prompt in prompts:
        if prompt.tensor not in model.inputs:
            raise bad_request(f"the model {model.name!r} has no input {prompt.tensor!r}; send text", "prompt")
    return prompts


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return Prompt("text_input", value)
    is_ids = isinstance(value, list) and value and all(type(each) is int and 0 <= each < 2**31 for each in value)
    if not is_ids:
        raise bad_request("'prompt' must be a text, a list of token ids (0 to 2^31 - 1), or a list of these", "prompt")
    return Prompt("input_ids", value)
