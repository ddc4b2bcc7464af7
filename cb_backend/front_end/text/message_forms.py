"""What a chat template wants messages to look like, found out by rendering small conversations with it.

Templates differ in what clients cannot know. A message's content is a text for most and a list of parts for some, and
who gets the wrong one shows nothing and says nothing. The arguments of a tool call are an object for most and JSON text
for some; some fail on a call without content, and some show no calls at all. This module knows no tokenizer and no
process: it is given something that renders.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, NamedTuple

from cb_backend.contracts.errors import InvalidRequestError

Message = dict[str, Any]
MAX_PROBING_S = 10.0  # a template that hangs is asked no more, and taken for one that wants text
_FIRST, _SECOND = "qprobea", "qprobeb"  # words that no template has
_CALL_ID = "abcdefghi"  # some templates insist on nine characters
_LONG_ID = "call_abcdefghijklmnopqrstuvwx"  # as OpenAI's are
_CALLS = ("tool_calls", "function_call")  # fields of a message; the second is OpenAI's older form
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}},
}


class ContentForm(NamedTuple):
    """Which forms of content a template shows."""

    takes_text: bool = True
    takes_parts: bool = False
    takes_many_parts: bool = False  # not the first one only


@dataclass(frozen=True)
class MessageForms:
    """The forms of one template. Roles that are not listed are written as the user's."""

    contents: dict[str, ContentForm] = field(default_factory=dict)
    takes_arguments_text: bool = False
    takes_short_ids: bool = False  # of calls: nine letters and digits, and no others (Mistral's)
    takes_null: bool = True  # as the content beside a call
    takes_no_content: bool = True  # a call without the field
    unshown: tuple[str, ...] = ()  # of `_CALLS`, what the template leaves out without a word
    needs_null: bool = False  # as the content beside a call, which is not shown beside any other (DeepSeek's)

    def with_content(self, message: Message) -> Message:
        """`message` with its content as the template wants it; where that takes both, as it was sent."""
        content = message.get("content")
        form = self.contents.get(message["role"]) or self.contents.get("user") or ContentForm()
        if isinstance(content, list) and not (form.takes_parts and form.takes_many_parts):
            content = "\n".join(part["text"] for part in content)  # as vLLM and TensorRT-LLM join them
        if not form.takes_text and form.takes_parts:
            if content is None and "content" in message:
                content = []
            elif isinstance(content, str):
                content = [_part(content)]
        return {**message, "content": content} if "content" in message else message

    def with_calls(self, index: int, message: Message) -> Message:
        """Message number `index` with its calls of tools, and its content beside them, as the template wants them.

        Raises `InvalidRequestError` for arguments in JSON text that holds no object, and for calls that the template
        does not show.
        """
        changed = dict(message)
        calls_in = [name for name in _CALLS if name in message]
        for name in calls_in:
            if name in self.unshown:
                raise InvalidRequestError(
                    f"the model's chat template shows no {name}, so those of message {index} would be lost; write the "
                    "call into its content, or ask a model whose template takes calls of tools"
                )
        is_taken = self.takes_null if "content" in message else self.takes_no_content
        if calls_in and message.get("content") is None and not is_taken:
            changed["content"] = ""
        if calls_in and self.needs_null:
            if message.get("content"):
                raise InvalidRequestError(
                    f"the model's chat template shows calls beside a null content only, so those of message {index} "
                    "would be lost; send its content as null, or as a message of its own"
                )
            changed["content"] = None
        if isinstance(message.get("function_call"), dict):
            changed["function_call"] = self._call(index, message["function_call"])
        if isinstance(message.get("tool_calls"), list):
            calls = [self._wrapped_call(index, call) for call in message["tool_calls"]]
            changed["tool_calls"] = [self._with_id("id", call) if isinstance(call, dict) else call for call in calls]
        return self._with_id("tool_call_id", changed)

    def _with_id(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        """A call, or a message, with the id that it has under this name as the template wants it."""
        is_other = self.takes_short_ids and isinstance(value.get(name), str)
        return {**value, name: _short_id(value[name])} if is_other else value

    def _wrapped_call(self, index: int, call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return {**call, "function": self._call(index, call["function"])}
        return self._call(index, call)

    def _call(self, index: int, call: dict[str, Any]) -> dict[str, Any]:
        arguments = call.get("arguments")
        if self.takes_arguments_text and isinstance(arguments, dict):
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        if not self.takes_arguments_text and isinstance(arguments, str):
            return {**call, "arguments": _parsed(index, arguments)}
        return call


def without_empty_fields(message: Message) -> Message:
    """`message` without what says nothing: clients send answers back with all the fields that these could have had, and
    templates look only whether a field is there. A null content stays: that says there is none."""
    kept = {name: value for name, value in message.items() if value is not None or name == "content"}
    if kept.get("tool_calls") == []:
        del kept["tool_calls"]
    if kept.get("role") == "assistant" and "content" in kept and not kept.keys() & set(_CALLS):
        kept["content"] = "" if kept["content"] is None else kept["content"]  # it said nothing, as when it was cut
    return kept


def _short_id(call_id: str) -> str:
    """The same for the same, wherever in a conversation it stands."""
    return call_id if _SHORT_ID.fullmatch(call_id) else blake2b(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _parsed(index: int, arguments: str) -> dict[str, Any]:
    if not arguments.strip():
        return {}
    where = f"message {index} has a tool call whose arguments"
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} are not valid JSON ({error}); send an object, or its JSON text") from None
    if not isinstance(values, dict):
        raise InvalidRequestError(f"{where} are {arguments[:60]!r}, which is no JSON object; send an object")
    return values


def find_forms(render: Callable[[dict[str, Any]], str]) -> MessageForms:
    """The forms of the template that `render` renders. `render` takes values beside those of every request, and may
    raise `InvalidRequestError`: a template that refuses a role is asked no more about it.
    """
    probe = _Probe(render, {})
    forms = probe.forms()
    if "user" not in forms.contents:  # nothing was shown: perhaps it cannot do without tools
        probe = _Probe(render, {"tools": [_TOOL]})
        forms = probe.forms()
    if "tool_calls" in forms.unshown:  # perhaps it shows calls beside a null content only
        others = probe.beside(None).forms()
        if "tool_calls" not in others.unshown:
            return replace(others, contents=forms.contents, needs_null=True)
    return forms


class _Probe:
    def __init__(self, render: Callable[[dict[str, Any]], str], values: dict[str, Any], blank: str | None = "") -> None:
        """blank: the content beside a call."""
        self._render = render
        self._values = values
        self._blank = blank
        self._deadline = time.monotonic() + MAX_PROBING_S

    def beside(self, blank: str | None) -> _Probe:
        """The same with another content beside calls."""
        return _Probe(self._render, self._values, blank)

    def forms(self) -> MessageForms:
        user = self._content_form(lambda content: [_message("user", content)])
        if user is None:
            return MessageForms()
        hello = _message("user", "hello" if user.takes_text else [_part("hello")])
        conversations: dict[str, Callable[[Any], list[Message]]] = {
            "system": lambda content: [_message("system", content), hello],
            "assistant": lambda content: [hello, _message("assistant", content), hello],
            "tool": lambda content: [hello, self._calling({}), _answering(content)],
        }
        found = {role: self._content_form(conversation) for role, conversation in conversations.items()}
        contents = {"user": user, **{role: form for role, form in found.items() if form is not None}}
        takes_text = self._takes_arguments_text(hello)
        arguments: Any = json.dumps({_FIRST: _SECOND}) if takes_text else {_FIRST: _SECOND}
        return MessageForms(
            contents,
            takes_text,
            self._takes_short_ids(hello, "{}" if takes_text else {}),
            self._takes_call(hello, {**self._calling(arguments), "content": None}),
            self._takes_call(hello, _without_content(self._calling(arguments))),
            tuple(name for name in _CALLS if not self._shows(name, hello, arguments)),
        )

    def _content_form(self, conversation: Callable[[Any], list[Message]]) -> ContentForm | None:
        """None: the template shows it in no form."""
        text = self._shown(conversation(_FIRST))
        parts = self._shown(conversation([_part(_FIRST), _part(_SECOND)]))
        # A list that is written as such was not read.
        is_read = _FIRST in parts and not any(quote + _FIRST in parts for quote in "'\"")
        form = ContentForm(_FIRST in text, is_read, is_read and _SECOND in parts)
        return form if form.takes_text or form.takes_parts else None

    def _takes_arguments_text(self, hello: Message) -> bool:
        arguments = {_FIRST: _SECOND}
        for end in _ENDS:
            as_object = self._shown([hello, self._calling(arguments), *end])
            as_text = self._shown([hello, self._calling(json.dumps(arguments)), *end])
            is_object_read = _FIRST in as_object and f"'{_FIRST}'" not in as_object
            if is_object_read or f'{{"{_FIRST}"' in as_text:
                return not is_object_read
        return False

    def _takes_short_ids(self, hello: Message, arguments: Any) -> bool:
        """Whether OpenAI's ids of calls are refused, and short ones are not."""
        return any(
            self._shown([hello, self._calling(arguments), *end(_CALL_ID)])
            and not self._shown([hello, self._calling(arguments, _LONG_ID), *end(_LONG_ID)])
            for end in (lambda call_id: [_answering("ok", call_id)], lambda call_id: [])
        )

    def _takes_call(self, hello: Message, call: Message) -> bool:
        """False where the template fails on `call`, and does not with an empty content."""
        return any(self._shown([hello, call, *end]) for end in _ENDS) or not any(
            self._shown([hello, {**call, "content": ""}, *end]) for end in _ENDS
        )

    def _shows(self, name: str, hello: Message, arguments: Any) -> bool:
        """Whether a call in the field `name` changes what the template makes. A template that fails on every call says
        so itself."""
        call = self._calling(arguments)
        if name == "function_call":
            call[name] = call.pop("tool_calls")[0]["function"]
        plain, is_rendered = _message("assistant", ""), False
        for values in ({}, {"tools": [_TOOL]}):
            for end in (*_ENDS, [_answering("ok"), hello]):
                text = self._shown([hello, call, *end], values)
                # A null content may itself be written, as a word.
                if _FIRST in text or (self._blank == "" and text and text != self._shown([hello, plain, *end], values)):
                    return True
                is_rendered = is_rendered or bool(text)
        return not is_rendered

    def _calling(self, arguments: Any, call_id: str = _CALL_ID) -> Message:
        call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "content": self._blank, "tool_calls": [call]}

    def _shown(self, messages: list[Message], values: dict[str, Any] | None = None) -> str:
        """What the template makes of them, beside more values; nothing where it fails."""
        if time.monotonic() > self._deadline:
            return ""
        try:
            return self._render({**self._values, **(values or {}), "messages": messages})
        except InvalidRequestError:
            return ""


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _message(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def _without_content(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "content"}


def _answering(content: Any, call_id: str = _CALL_ID) -> Message:
    return {"role": "tool", "name": "f", "tool_call_id": call_id, "content": content}


_ENDS: tuple[list[Message], ...] = ([_answering("ok")], [])  # of a conversation with a call; some templates want one
