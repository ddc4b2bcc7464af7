"""`cb-backend chat [MODEL]`: talk with a model on the terminal.

With a server that runs; where none does and MODEL is a checkpoint, with one that is started for the chat. Ctrl-C ends
an answer and not the chat. What comes through a pipe is one message, and the answer alone goes to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import signal
import sys
from collections.abc import Iterator
from typing import Any

from cb_backend.cli.paths import CliError
from cb_backend.cli.server.addresses import refuse_http
from cb_backend.cli.terminal.chat_commands import Commands
from cb_backend.cli.terminal.conversation import Answer, ChatServer, Conversation
from cb_backend.cli.terminal.local_state import local_servers
from cb_backend.cli.terminal.own_server import own_server
from cb_backend.front_end.engines.engine_observer import model_of
from cb_backend.front_end.engines.runtime_dir import model_name, read_model
from cb_backend.gateway.errors import ApiError
from cb_backend.support.argument_types import server_address

DEFAULT_URL = "localhost:8001"
PROMPT, MORE = ">>> ", "... "
SEVERAL_LINES = '"""'
_DIM, _NORMAL = "\x1b[2m", "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [options]"
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model of the server, or a checkpoint to serve")
    parser.add_argument(
        "--url", type=server_address, metavar="HOST:PORT", help=f"the server's gRPC address (default: {DEFAULT_URL})"
    )
    parser.add_argument("-q", "--quick", metavar="TEXT", help="one message; print the answer and end")
    parser.add_argument("--system", metavar="TEXT", help="the system's message")
    parser.add_argument("--max-tokens", type=int, help="most tokens of an answer (default: all that fit)")
    parser.add_argument("--temperature", type=float, help="0 = greedy (default: the server's)")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--verbose", action="store_true", help="tokens and times after each answer")


def run(args: argparse.Namespace) -> int:
    loop = asyncio.new_event_loop()
    if isinstance(sys.stdin, io.TextIOWrapper):  # a diff may hold another encoding's letters
        sys.stdin.reconfigure(errors="replace")
    with contextlib.ExitStack() as beside:
        beside.callback(loop.close)
        server, name = _server(args, loop, beside)
        beside.callback(lambda: loop.run_until_complete(server.close()))
        chat = _Chat(args, loop, server, name)
        text = args.quick if args.quick is not None else None if sys.stdin.isatty() else sys.stdin.read().strip()
        if text is not None:
            return chat.ask_once(text)
        return chat.talk()


def _server(
    args: argparse.Namespace, loop: asyncio.AbstractEventLoop, beside: contextlib.ExitStack
) -> tuple[ChatServer, str]:
    """The server to talk with, and its model. Raises `CliError`."""
    server = ChatServer(args.url or DEFAULT_URL)
    try:
        models = loop.run_until_complete(server.models())
    except ApiError as error:
        loop.run_until_complete(server.close())
        if args.url is not None:
            refuse_http(args.url)
            raise CliError(error.message) from None
        if args.model is None:
            raise CliError(
                f"no server answers at {DEFAULT_URL}; start one (cb-backend serve), name another (--url), or name a "
                "checkpoint that is to be served for this chat: cb-backend chat MODEL"
            ) from None
        started = beside.enter_context(own_server(args.model, _note))
        return ChatServer(started.grpc_address), "llm"
    try:
        return server, _chosen(args.model, models, server.url)
    except CliError:
        loop.run_until_complete(server.close())
        raise


def _chosen(wanted: str | None, models: list[str], url: str) -> str:
    known = ", ".join(models) or "none that takes chats"
    if wanted is None:
        if "llm" in models or len(models) == 1:
            return "llm" if "llm" in models else models[0]
        raise CliError(f"the server at {url} has {known}; name one: cb-backend chat MODEL")
    if wanted in models:
        return wanted
    for server in local_servers():  # by the checkpoint that it serves
        for life in server.engines:
            name = model_name(read_model(life.folder))
            is_there = server.grpc is not None and server.grpc == url.replace("localhost", "127.0.0.1")
            if is_there and model_of(life) == wanted and name in models:
                return name
    raise CliError(
        f"the server at {url} has no model {wanted!r}; it has {known} (stop it, and `cb-backend chat {wanted}` starts "
        "one for a checkpoint)"
    )


class _Chat:
    """The terminal's side."""

    def __init__(
        self, args: argparse.Namespace, loop: asyncio.AbstractEventLoop, server: ChatServer, model: str
    ) -> None:
        names = ("max_tokens", "temperature", "top_p", "seed")
        sampling: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
        self._conversation = Conversation(args.system, sampling)
        self._commands = Commands(self._conversation, lambda: loop.run_until_complete(server.models()))
        self._loop, self._server, self._model = loop, server, model
        self._is_verbose = args.verbose
        self._longer = "/set max_tokens N for longer ones, /clear where no room is left"
        self._is_terminal, self._is_dim = sys.stdout.isatty(), False

    def ask_once(self, text: str) -> int:
        if not text:
            raise CliError("there is no message: nothing came through the pipe")
        self._longer = "--max-tokens N for a longer one"  # nobody is here to type a command
        self._conversation.say(text)
        answer, error = self._answer()
        if error is not None:
            raise CliError(error)
        return 0 if answer.finish_reason else 130

    def talk(self) -> int:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() edits lines with it, and remembers them
        print(f"{self._model} at {self._server.url}. /help tells the commands, Ctrl-D ends.")
        for line in _lines():
            text: str | None = line.strip()
            if line.startswith("/"):
                outcome = self._commands.run(line)
                self._model = outcome.model or self._model
                if outcome.text:
                    print(outcome.text)
                if outcome.is_end:
                    break
                text = outcome.ask
            if text:
                self._conversation.say(text)
                _, error = self._answer()
                if error is not None:
                    print(f"error: {error}", file=sys.stderr)
        return 0

    def _answer(self) -> tuple[Answer, str | None]:
        """The next answer, shown while it comes, and why there is none."""
        answer, problem = Answer(), None
        task = self._loop.create_task(self._server.answer(self._model, self._conversation, self._show, answer))
        self._loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            self._loop.run_until_complete(task)
        except asyncio.CancelledError:
            print(" (ended)", end="", file=sys.stderr, flush=True)
        except ApiError as error:
            problem = error.message
        finally:
            self._loop.remove_signal_handler(signal.SIGINT)
        print(_NORMAL if self._is_dim else "", flush=True)
        self._is_dim = False
        self._conversation.take(answer)
        if self._is_verbose and answer.num_tokens:
            _note(answer.figures)
        if answer.finish_reason == "length":
            _note(f"the answer was cut: {self._longer}")
        return answer, problem

    def _show(self, text: str, is_reasoning: bool) -> None:
        if not self._is_terminal:  # a program wants the answer
            text = "" if is_reasoning else text
        elif is_reasoning != self._is_dim:
            self._is_dim = is_reasoning
            text = f"{_DIM}{text}" if is_reasoning else f"{_NORMAL}\n\n{text}"
        print(text, end="", flush=True)


def _lines() -> Iterator[str]:
    """What is typed, messages of several lines as one. Ctrl-C drops the line, Ctrl-D ends."""
    while True:
        try:
            line = input(PROMPT)
            if line.startswith(SEVERAL_LINES):
                line = line[len(SEVERAL_LINES) :]
                while SEVERAL_LINES not in line:
                    line += "\n" + input(MORE)
                line = " " + line.partition(SEVERAL_LINES)[0]  # no command, whatever it begins with
        except KeyboardInterrupt:
            print("\nCtrl-D or /bye ends the chat.")
            continue
        except EOFError:
            print()
            return
        yield line


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
