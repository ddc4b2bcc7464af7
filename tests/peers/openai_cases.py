"""OpenAI requests for the frontend, each with what our own client gets for the same prompt and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PROMPT = "the quick brown fox"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the lazy dog"}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": 24}
PENALTIES: dict[str, Any] = {**GREEDY, "frequency_penalty": 1.9, "presence_penalty": 1.9}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}}


@dataclass(frozen=True)
class Case:
    """`expected`: text, and the numbers of tokens of prompt and answer."""

    title: str
    is_chat: bool
    body: dict[str, Any]
    expected_text: str
    expected_usage: tuple[int, int]

    @property
    def may_stream(self) -> bool:
        """With `echo` no stream of these backends repeats a prompt: vLLM's refuses it, TensorRT-LLM's leaves it out."""
        return "echo" not in self.body

    def compare(self, text: str, usage: tuple[int, int], tokens: list[str]) -> str:
        """Why an answer is wrong; empty if it is right."""
        if text != self.expected_text:
            return f"text {text!r} instead of {self.expected_text!r}"
        if usage != self.expected_usage:
            return f"tokens {usage} instead of {self.expected_usage}"
        if "logprobs" in self.body and len(tokens) != usage[1]:
            return f"log-probabilities of {len(tokens)} tokens instead of {usage[1]}"
        return ""


def cases(client: Any, tokenizer: Any, default_max_tokens: int, backend: str) -> Iterator[Case]:
    """The requests of one format. `client`: our own, to the model `llm` of the same server."""

    def case(
        title: str,
        body: dict[str, Any],
        is_chat: bool = False,
        sampling: dict[str, Any] | None = None,
        prompt: str = PROMPT,
        before: str = "",
    ) -> Case:
        own = body if sampling is None else sampling
        responses = list(client.responses(prompt, is_streaming=False, **own))
        text = before + "".join(response.text for response in responses)
        usage = (responses[0].num_input_tokens, sum(response.num_output_tokens for response in responses))
        content = {"messages": MESSAGES} if is_chat else {"prompt": PROMPT}
        return Case(f"{'chat' if is_chat else 'completion'}: {title}", is_chat, {**content, **body}, text, usage)

    def chat(title: str, body: dict[str, Any], sampling: dict[str, Any] | None = None, tools: Any = None) -> Case:
        prompt = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, tools=tools)
        return case(title, body, True, sampling, prompt)

    stop = client.generate(PROMPT, **GREEDY)[6:9]
    yield case("greedy", GREEDY)
    yield case("temperature, top_p, seed", SAMPLED)
    yield case("penalties", PENALTIES)
    yield case("stop, one text", {**GREEDY, "stop": stop}, sampling={**GREEDY, "stop": [stop]})
    yield case("stop, two texts", {**GREEDY, "stop": ["no such text", stop]})
    yield case("no max_tokens", {"temperature": 0.0}, sampling={"temperature": 0.0, "max_tokens": default_max_tokens})
    yield case("echo", {**GREEDY, "echo": True}, sampling=GREEDY, before=PROMPT)
    yield case("a user", {**GREEDY, "user": "somebody"}, sampling=GREEDY)
    yield chat("greedy", GREEDY)
    yield chat("temperature, top_p, seed", SAMPLED)
    yield chat("penalties", PENALTIES)
    yield chat("max_completion_tokens", {"temperature": 0.0, "max_completion_tokens": 9}, {**GREEDY, "max_tokens": 9})
    long = {"temperature": 0.0, "max_tokens": 60}
    guided = {**long, "structured_outputs": {"json": SCHEMA}}
    required = {**long, "tools": [TOOL], "tool_choice": "required"}
    yield chat("a required tool", required, guided, [TOOL])
    named = {"type": "function", "function": {"name": "weather"}}
    yield chat("a named tool", {**required, "tool_choice": named}, guided, [TOOL])
    if backend == "vllm":  # the frontend refuses log-probabilities of any other
        yield case("logprobs", {**GREEDY, "logprobs": 2}, sampling=GREEDY)
        yield chat("logprobs", {**GREEDY, "logprobs": True, "top_logprobs": 2}, sampling=GREEDY)


def read_events(events: list[dict[str, Any]]) -> tuple[str, tuple[int, int], list[str]]:
    """Text, tokens (of the prompt, of the answer) and the tokens' texts where log-probabilities were asked for, of a
    whole answer or of all chunks of one."""
    text, tokens = "", []
    for choice in (choice for event in events for choice in event["choices"]):
        message = choice.get("message") or choice.get("delta") or choice
        text += message.get("content") or message.get("text") or ""
        text += "".join(call["function"]["arguments"] for call in message.get("tool_calls") or [])
        logprobs = choice.get("logprobs") or {}
        tokens += logprobs.get("tokens") or [entry["token"] for entry in logprobs.get("content") or []]
    usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
    return text, (usage["prompt_tokens"], usage["completion_tokens"]), tokens
