"""The commands of a chat on the terminal: lines that begin with a slash. They change the conversation and say so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cb_backend.cli.terminal.conversation import Conversation
from cb_backend.gateway.errors import ApiError

HELP = {
    "/help": "these lines; /? too",
    "/clear": "forget what has been said",
    "/retry": "forget the last answer and ask again",
    "/undo": "forget the last question and its answer",
    "/system [TEXT]": "the system's message; without TEXT none",
    "/set [NAME VALUE]": "a parameter of the answers (temperature, max_tokens, ...); alone: those that are set",
    "/unset NAME": "back to the server's own",
    "/model [NAME]": "talk with another model; alone: which there are",
    "/save FILE": "write what has been said, as JSON",
    "/load FILE": "go on with what /save has written",
    "/show": "what has been said",
    "/bye": "end; Ctrl-D too",
}
_HINT = 'Ctrl-C ends an answer. """ begins and ends a message of several lines.'
_OWN = ("messages", "stream", "model", "n", "tools", "tool_choice")
_WORDS = tuple(name.split()[0] for name in HELP)


@dataclass(slots=True)
class Outcome:
    """What a command has done: `text` to show; `ask`: a question to ask now; `is_end`: of the chat."""

    text: str = ""
    ask: str | None = None
    is_end: bool = False
    model: str | None = None


class Commands:
    """Over one conversation. `models` names those that there are."""

    def __init__(self, conversation: Conversation, models: Callable[[], list[str]]) -> None:
        self._conversation = conversation
        self._models = models
        # What these return is shown, and that is all.
        self._plain: dict[str, Callable[[str], str]] = {
            "/help": self._help, "/clear": self._clear, "/undo": self._undo, "/system": self._system, "/set": self._set,
            "/unset": self._unset, "/save": self._save, "/load": self._load, "/show": self._show,
        }  # fmt: skip

    def run(self, line: str) -> Outcome:
        """Of a line that begins with a slash. What is wrong is its text: a chat goes on."""
        word, _, rest = line.strip().partition(" ")
        name = {"/?": "/help", "/exit": "/bye", "/quit": "/bye"}.get(word, word)
        if name not in _WORDS:
            return Outcome(f"there is no command {word!r}; /help tells them (a space before it makes it a message)")
        try:
            return Outcome(self._plain[name](rest.strip())) if name in self._plain else self._other(name, rest)
        except (OSError, ValueError, ApiError) as error:  # the last: the server is away
            return Outcome(f"{word}: {error}")

    def _other(self, name: str, rest: str) -> Outcome:
        if name == "/bye":
            return Outcome(is_end=True)
        if name == "/retry":
            question = self._conversation.take_back()
            return Outcome(ask=question) if question else Outcome("nothing has been asked yet")
        wanted, known = rest.strip(), self._models()
        if not wanted:
            return Outcome("\n".join(known))
        if wanted not in known:
            return Outcome(f"there is no model {wanted!r}; there is: {', '.join(known)}")
        return Outcome(f"you talk with {wanted} now; it gets what has been said", model=wanted)

    def _help(self, rest: str) -> str:
        width = max(len(name) for name in HELP)
        return "\n".join([*(f"{name:{width}}  {text}" for name, text in HELP.items()), _HINT])

    def _clear(self, rest: str) -> str:
        self._conversation.messages.clear()
        return "what was said is forgotten"

    def _undo(self, rest: str) -> str:
        question = self._conversation.take_back()
        return f"forgotten: {question[:60]}" if question else "nothing has been asked yet"

    def _system(self, rest: str) -> str:
        self._conversation.system = rest or None
        return "the system's message is set" if rest else "there is no system's message"

    def _set(self, rest: str) -> str:
        name, _, text = rest.partition(" ")
        if not name:
            return json.dumps(self._conversation.sampling) if self._conversation.sampling else "nothing is set"
        if not text:
            raise ValueError("give a name and a value: /set temperature 0.7")
        _check_free(name)
        self._conversation.sampling[name] = _value(text.strip())
        return f"{name} = {json.dumps(self._conversation.sampling[name])}"

    def _unset(self, rest: str) -> str:
        if rest not in self._conversation.sampling:
            raise ValueError(f"{rest!r} is not set")
        del self._conversation.sampling[rest]
        return f"{rest} is the server's own again"

    def _save(self, rest: str) -> str:
        path = _path(rest)
        values = {"system": self._conversation.system, "messages": self._conversation.messages}
        path.write_text(json.dumps({**values, "sampling": self._conversation.sampling}, indent=2, ensure_ascii=False))
        return f"{len(self._conversation.messages)} messages are in {path}"

    def _load(self, rest: str) -> str:
        path = _path(rest)
        values = json.loads(path.read_text())
        messages = values.get("messages") if isinstance(values, dict) else None
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise ValueError(f"{path} holds no conversation of /save")
        system, sampling = values.get("system"), values.get("sampling") or {}
        if not isinstance(system, str | None) or not isinstance(sampling, dict):
            raise ValueError(f"{path} holds no conversation of /save: system must be a text, sampling an object")
        for name in sampling:
            _check_free(name)
        self._conversation.system = system
        self._conversation.messages[:] = messages
        self._conversation.sampling.update(sampling)
        return f"{len(messages)} messages from {path}"

    def _show(self, rest: str) -> str:
        system = [] if self._conversation.system is None else [f"system: {self._conversation.system}"]
        said = [f"{message['role']}: {message.get('content')}" for message in self._conversation.messages]
        return "\n".join([*system, *said]) or "nothing has been said yet"


def _check_free(name: str) -> None:
    if name in _OWN:
        raise ValueError(f"{name!r} is the chat's own")


def _path(text: str) -> Path:
    if not text:
        raise ValueError("give a file's name")
    return Path(text).expanduser()


def _value(text: str) -> Any:
    """JSON where it is some, else a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
