"""How a model's chat template has calls of tools written, and reasoning: what its answers will look like.

Read off the template's source by the marks that only one form has, so a template that is new is nobody's rather than
the wrong one's. Names are those of the gateway's parsers. Whether a prompt leaves reasoning open depends on the request
and is seen by the prompt itself (`tokenized`).
"""

from __future__ import annotations

from collections.abc import Mapping

from cb_backend.front_end.text.template_files import DEFAULT, TOOL_USE

AUTO, NONE = "auto", "none"
HERMES, LLAMA3, MISTRAL, GPT_OSS = "hermes", "llama3", "mistral", "gpt-oss"
THINK = "think"

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
