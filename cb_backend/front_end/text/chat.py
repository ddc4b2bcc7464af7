"""Chat messages to a prompt: the checkpoint's template around them, and their own text never more than text.

A message that spells a control token (`<|im_end|>`) must not become one. So before rendering, in everything that the
client sends, the first character of each such token is replaced by a private one: what looks like a control token
afterwards was written by the template. Where messages spell none, the tokens are exactly what the tokenizer makes of
the rendered text; else the parts between the template's control tokens are encoded as plain characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.front_end.text.answer_forms import with_reasoning
from cb_backend.front_end.text.chat_template import ChatTemplate
from cb_backend.front_end.text.message_forms import without_empty_fields
from cb_backend.front_end.text.template_files import DEFAULT, TOOL_USE
from cb_backend.front_end.text.tokenizer import Tokenizer

MAX_MESSAGES_BYTES = 4 << 20
MAX_MESSAGES = 4096
MAX_DEPTH = 32
_ROLE = re.compile(r"[a-z_]{1,32}")
_ARGUMENT = re.compile(r"[a-z][a-z0-9_]{0,63}")
_PLAIN = ("role", "content")  # fields of a message that are marked in their own way
_FIRST_MARK = 0xF0000  # private use: no text has a meaning here


class Chat:
    """The chat side of one tokenizer. One per front end, shared by its threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._templates = {name: ChatTemplate(source) for name, source in tokenizer.chat_templates.items()}
        # What every template is given. As in transformers, tools and documents are there without being sent.
        self._values = {"tools": None, "documents": None, "add_generation_prompt": True, **tokenizer.named_tokens}
        controls = tokenizer.control_tokens
        longest_first = sorted(controls, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first))) if controls else None
        firsts = sorted({text[0] for text in controls})
        self._marks = str.maketrans({first: chr(_FIRST_MARK + index) for index, first in enumerate(firsts)})
        self._unmarks = str.maketrans({chr(_FIRST_MARK + index): first for index, first in enumerate(firsts)})

    def encode(self, text: str) -> list[int]:
        """Token ids of a request's `messages`: a JSON list, or an object of them and the template's arguments.

        Arguments that are named in its list "optional" are left out where the template does not use them. Of several
        templates, `chat_template` names one; else it is "tool_use" where tools are given, and "default".
        Raises `InvalidRequestError` for malformed messages, and where the model has no template or its template
        refuses them.
        """
        values = _load(text)
        if any(mark in text for mark in map(chr, self._unmarks)) or "\\udb80" in text.lower():
            raise InvalidRequestError("messages hold private-use characters (U+F0000 and up); remove them")
        optional = _take_optional(values)
        template = self._select(values)
        arguments = {name: value for name, value in values.items() if name not in ("messages", "chat_template")}
        for name in optional - template.variables():
            arguments.pop(name, None)
        for name in ("tools", "documents"):
            if arguments.get(name) is None:
                arguments.pop(name, None)
        self._check_arguments(arguments, template.variables())
        messages = _check_messages(values["messages"])
        forms = template.forms(self._values)
        messages = [with_reasoning(message, template.reasoning_field) for message in messages]
        messages = [forms.with_calls(index, message) for index, message in enumerate(messages)]
        rendered = template.render(
            {
                **self._values,
                **{name: _map_strings(value, self._mark) for name, value in arguments.items()},
                "messages": [forms.with_content(self._marked_message(message)) for message in messages],
            }
        )
        return self._tokenise(rendered)

    def close(self) -> None:
        for template in self._templates.values():
            template.close()

    def _select(self, values: dict[str, Any]) -> ChatTemplate:
        if not self._templates:
            raise InvalidRequestError("this model has no chat template; render the prompt and send it as text_input")
        names = ", ".join(sorted(self._templates))
        name = values.get("chat_template")
        if name is not None:
            if not isinstance(name, str) or name not in self._templates:
                raise InvalidRequestError(
                    f"chat_template must name one of this model's own ({names}), got {name!r:.64}"
                )
            return self._templates[name]
        if TOOL_USE in self._templates and values.get("tools") is not None:
            return self._templates[TOOL_USE]
        if DEFAULT not in self._templates:
            raise InvalidRequestError(
                f"this model has no default chat template, but {names}; name one as chat_template beside messages"
            )
        return self._templates[DEFAULT]

    def _check_arguments(self, arguments: dict[str, Any], variables: frozenset[str]) -> None:
        for name in arguments:
            if name in self._tokenizer.named_tokens or not _ARGUMENT.fullmatch(name):
                raise InvalidRequestError(f"{name[:64]!r} in messages cannot be set; remove it")
            if name not in variables and name != "add_generation_prompt":
                raise InvalidRequestError(f"this model's chat template does not use {name!r}; remove it")

    def _mark(self, text: str) -> str:
        return text.translate(self._marks)

    def _mark_special(self, text: str) -> str:
        """For what the model itself said: tags like <think> keep their meaning, turns cannot be forged."""
        if self._control is None:
            return text
        specials = self._tokenizer.pieces.special_ids

        def mark(match: re.Match[str]) -> str:
            is_special = self._tokenizer.control_tokens[match[0]] in specials
            return match[0][0].translate(self._marks) + match[0][1:] if is_special else match[0]

        return self._control.sub(mark, text)

    def _marked_message(self, message: dict[str, Any]) -> dict[str, Any]:
        mark = self._mark_special if message["role"] == "assistant" else self._mark
        marked = {mark(name): _map_strings(value, mark) for name, value in message.items() if name not in _PLAIN}
        content = message.get("content")
        if isinstance(content, list):  # what tells parts apart must stay readable
            content = [{"type": "text", "text": mark(part["text"])} for part in content]
        elif isinstance(content, str):
            content = mark(content)
        return {**marked, "role": message["role"], **({"content": content} if "content" in message else {})}

    def _tokenise(self, rendered: str) -> list[int]:
        """`rendered` holds marks. Marks and what they stand for have one character each, so places stay the same."""
        text = rendered.translate(self._unmarks)
        if self._control is None:
            return self._tokenizer.encode_plain(text)
        real = [match.span() for match in self._control.finditer(rendered)]
        if real == [match.span() for match in self._control.finditer(text)]:
            return self._tokenizer.encode_plain(text)
        ids: list[int] = []
        end = 0
        for start, next_end in real:
            ids += self._tokenizer.encode_characters(text[end:start])
            ids.append(self._tokenizer.control_tokens[text[start:next_end]])
            end = next_end
        return ids + self._tokenizer.encode_characters(text[end:])


def _take_optional(values: dict[str, Any]) -> set[str]:
    names = values.pop("optional", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidRequestError('"optional" of messages must be a list of names of the template\'s arguments')
    return set(names)


def _load(text: str) -> dict[str, Any]:
    if len(text.encode()) > MAX_MESSAGES_BYTES:
        raise InvalidRequestError(f"messages have more than {MAX_MESSAGES_BYTES} bytes of JSON; send less")
    try:
        values = json.loads(text)
    except RecursionError:
        raise InvalidRequestError("messages are nested too deeply") from None
    except ValueError as error:
        raise InvalidRequestError(f"messages are not valid JSON: {error}") from None
    if isinstance(values, list):
        values = {"messages": values}
    if not isinstance(values, dict) or not isinstance(values.get("messages"), list):
        raise InvalidRequestError('messages must be a JSON list, or an object with a list "messages"')
    return values


def _check_messages(messages: list[Any]) -> list[dict[str, Any]]:
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequestError(f"there must be 1 to {MAX_MESSAGES} messages, got {len(messages)}")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"message {index} must be an object with role and content")
    message = without_empty_fields(message)
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequestError(f"message {index} needs a role such as user, assistant or system, in lower case")
    content = message.get("content")
    if content is None and not {"tool_calls", "function_call"} & message.keys():
        raise InvalidRequestError(f"message {index} has no content")
    if isinstance(content, list):
        return {**message, "content": [_text_part(index, part) for part in content]}
    if content is not None and not isinstance(content, str):
        raise InvalidRequestError(f"the content of message {index} must be a string or a list of text parts")
    return message


def _text_part(index: int, part: Any) -> dict[str, str]:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidRequestError(f'message {index} has a part that is not {{"type": "text", "text": "..."}}')
    return {"type": "text", "text": part["text"]}


def _map_strings(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """`value` with every string in it changed, names of fields included."""
    if depth > MAX_DEPTH:
        raise InvalidRequestError("messages are nested too deeply")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(element, change, depth + 1) for element in value]
    if isinstance(value, dict):
        return {change(name): _map_strings(element, change, depth + 1) for name, element in value.items()}
    return value
