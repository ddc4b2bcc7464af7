"""Chat templates in the shapes in which people publish them: who wants what, under which names, in which files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.front_end.published_case import CHATML, PLAIN, SAME, SYSTEM, Case, ChatPair, case, chatml_byte_level, user

LOOP = """{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}:{% for part in m['content'] %}
{%- if part['type'] == 'text' %}{{ part['text'] }}|{% endif %}{% endfor %}{{ eos_token }}{% endfor %}"""
FIRST_PART = "{% for m in messages %}<|im_start|>{{ m['content'][0]['text'] }}<|im_end|>{% endfor %}"
EITHER = """{% for m in messages %}<|im_start|>{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}{{ part.text }};{% endfor %}{% endif %}<|im_end|>{% endfor %}"""
# The system's content is text, everybody else's parts.
MIXED = """{% for m in messages %}<|im_start|>{% if m.role == 'system' %}{{ m.content | trim }}{% else %}
{%- for part in m.content %}{{ part.text }};{% endfor %}{% endif %}<|im_end|>{% endfor %}"""
MACRO = """{% macro show(content) %}{% for item in content %}{% if item.type == 'text' %}{{ item.text }}{% endif %}
{%- endfor %}{% endmacro %}{% for m in messages %}<|im_start|>{{ show(m.content) }}<|im_end|>{% endfor %}"""
TOOLS_JSON = """{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>
{%- for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}
{{- m.content if m.content is defined else 'nothing' }}<|im_end|>{% endfor %}"""
TOOLS_ITEMS = """{% for m in messages %}<|im_start|>{% for c in m.tool_calls or [] %}
{%- for name, value in c.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}{% endfor %}
{{- m.content or '' }}<|im_end|>{% endfor %}"""
TOOLS_TEXT = """{% for m in messages %}<|im_start|>{% for c in m.tool_calls or [] %}
{{- '```json\n' + c.function.arguments + '\n```' }}{% endfor %}{{ m.content or '' }}<|im_end|>{% endfor %}"""
# As Mistral's: ids of other makers are refused.
SHORT_IDS = """{% for m in messages %}<|im_start|>{% for c in m.tool_calls or [] %}
{%- if c.id | length != 9 %}{{ raise_exception('Tool call IDs!') }}{% endif %}{{ c.id }}{% endfor %}
{%- if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs!') }}{% endif %}
{{- m.tool_call_id }}{% endif %}{{ m.content or '' }}<|im_end|>{% endfor %}"""
# As Llama 3.1's, which looks whether the field is there, and takes one call.
ONE_CALL = """{% for m in messages %}<|im_start|>{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}
{{- raise_exception('only supports single tool-calls at once!') }}{% endif %}f {{ m.tool_calls[0].function.name }}
{%- else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"""
# Content that is added to a text, null or not.
ADDED = """{% for m in messages %}{{ '<|im_start|>' + m['content'] }}{% for c in m.tool_calls or [] %}
{{- c.function.name }}{% endfor %}<|im_end|>{% endfor %}"""
IF_TOOLS = """{% for m in messages %}<|im_start|>{% if tools and m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}
{{- m.content }}<|im_end|>{% endfor %}"""
NONE_CHECK = "{% if tools is not none %}tools{% endif %}{% if documents is not none %}documents{% endif %}" + PLAIN
TOOL_USE = "tool_use:" + PLAIN + "{{ tools | length }}"


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def calling(arguments: Any, **fields: Any) -> dict[str, Any]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **fields}


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
ANSWER = {"role": "tool", "name": "f", "tool_call_id": "abcdefghi", "content": "42"}


def published_templates() -> Iterator[Case]:
    yield from _content_cases()
    yield from _named_cases()
    yield from _tool_call_cases()


def _config(template: Any) -> dict[str, Any]:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **CHATML, "chat_template": template}
    return {"tokenizer_config.json": config}


def _content_cases() -> Iterator[Case]:
    many, joined = [user([part("a"), part("b")])], [user([part("a\nb")])]
    hello = ChatPair([user("Hello")], [user([part("Hello")])])
    for name, template, chats in [
        ("text", PLAIN, [*SAME, ChatPair(many, [user("a\nb")])]),
        ("parts-loop", LOOP, [hello, ChatPair(many, many)]),
        ("parts-first", FIRST_PART, [hello, ChatPair(many, joined)]),
        ("parts-or-text", EITHER, [*SAME, ChatPair(many, many)]),
        ("parts-but-system", MIXED, [ChatPair([SYSTEM, user("x")], [SYSTEM, user([part("x")])])]),
        ("parts-in-macro", MACRO, [hello, ChatPair(many, many)]),
        ("no-tools-is-none", NONE_CHECK, SAME),
    ]:
        yield case(name, chatml_byte_level, _config(template), chats)


def _named_cases() -> Iterator[Case]:
    named = {"default": PLAIN, "tool_use": TOOL_USE}
    as_list = [{"name": name, "template": template} for name, template in named.items()]
    folder, file = "additional_chat_templates/", "chat_template.jinja"
    with_tools = [*SAME, ChatPair([user("x")], [user("x")], {"tools": [TOOL]})]
    asked = [ChatPair([user("x")], [user("x")], {"chat_template": "rag"})]
    for name, files, chats in [
        ("named-list", _config(as_list), with_tools),
        ("named-object", _config(named), with_tools),
        ("template-folder", {**_config(None), file: PLAIN, f"{folder}tool_use.jinja": TOOL_USE}, with_tools),
        ("file-over-list", {**_config(as_list), file: "{{ tools }}" + PLAIN}, with_tools),
        ("asked-by-name", _config([{"name": "rag", "template": PLAIN}]), asked),
    ]:
        yield case(name, chatml_byte_level, files, chats)


def _tool_call_cases() -> Iterator[Case]:
    values = {"city": "Zürich", "n": [1, 2.5]}
    as_text = json.dumps(values)
    wanted: Any
    for name, template, wanted in [
        ("arguments-tojson", TOOLS_JSON, values),
        ("arguments-items", TOOLS_ITEMS, values),
        ("arguments-text", TOOLS_TEXT, as_text),
    ]:
        chats = [
            ChatPair([user("x"), calling(sent, **fields), ANSWER], [user("x"), calling(wanted, **fields), ANSWER])
            for sent in (as_text, wanted)
            for fields in ({}, {"content": None}, {"content": "so"})
        ]
        yield case(name, chatml_byte_level, _config(template), chats)
