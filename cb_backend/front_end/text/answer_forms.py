"""How a model's chat template has calls of tools written, and reasoning: what its answers will look like.

Read off the template's source by the marks that only one form has, so a template that is new is nobody's rather than
the wrong one's. Names are those of the gateway's parsers. Whether a prompt leaves reasoning open depends on the request
and is seen by the prompt itself (`tokenized`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from cb_backend.front_end.text.template_files import DEFAULT, TOOL_USE

AUTO, NONE = "auto", "none"
HERMES, LLAMA3, MISTRAL, GPT_OSS = "hermes", "llama3", "mistral", "gpt-oss"
THINK = "think"
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")  # of what a message thought: the gateway's name first

# In this order: a form of calls, and texts of which a template of that form has all of one tuple.
_FORMS: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    (GPT_OSS, (("<|channel|>", "<|message|>"),)),
    (MISTRAL, (("[TOOL_CALLS]",),)),
    # Calls between Hermes' marks that are no JSON (Qwen3-Coder, GLM 4.5), and calls in marks of their own (DeepSeek,
    # Kimi, Granite, MiniMax): nothing here reads them.
    (NONE, (("<tool_call>", "<function="), ("<tool_call>", "<arg_key>"), ("<\uff5ctool\u2581calls\u2581begin\uff5c>",),
            ("<|tool_calls_section_begin|>",), ("<|tool_call|>",), ("<minimax:tool_call>",))),
    (HERMES, (("<tool_call>", "</tool_call>"),)),
    (LLAMA3, (("<|python_tag|>",), ('"parameters": dictionary of argument name',))),
)  # fmt: skip


def tool_form(templates: Mapping[str, str]) -> str:
    """Of calls of tools. `templates`: a tokenizer's, name -> source; that which is taken where tools are given counts.

    AUTO where nothing tells: there is no template, or none that knows tools.
    """
    source = templates.get(TOOL_USE) or templates.get(DEFAULT) or ""
    for form, alternatives in _FORMS:
        if any(all(text in source for text in texts) for texts in alternatives):
            return form
    return AUTO


def reasoning_form(templates: Mapping[str, str]) -> str:
    """GPT_OSS for its channels, else THINK: who writes no `<think>` loses nothing by that."""
    return GPT_OSS if tool_form(templates) == GPT_OSS else THINK


class ReasoningField(NamedTuple):
    """Where a template reads what a message thought."""

    name: str
    is_beside_content: bool = True  # in a message with calls too; else that has one place for both, and refuses two


def reasoning_field(source: str) -> ReasoningField | None:
    """That of a template; None: it reads none of the names that are in use.

    Of the source: many templates show it only before a call of the last turn, which no short conversation finds.
    """
    found = (name for name in REASONING_NAMES if re.search(rf"\.{name}\b|['\"]{name}['\"]", source))
    return next((ReasoningField(name, is_beside_content="<|channel|>" not in source) for name in found), None)


def with_reasoning(message: dict[str, Any], field: ReasoningField | None) -> dict[str, Any]:
    """`message` with its reasoning under the name that the template reads, whichever name a client has sent it under.

    A model that calls tools goes on from its own reasoning, which would be lost without a word otherwise.
    """
    names = () if field is None else (field.name, *REASONING_NAMES)
    sent = next((message[name] for name in names if isinstance(message.get(name), str)), None)
    if field is None or sent is None:
        return message
    content = message.get("content")
    if field.is_beside_content or not (sent and content and message.get("tool_calls")):
        return {**message, field.name: sent}
    said = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    return {**message, field.name: f"{sent}\n{said}", "content": ""}
