"""`cb-backend`: one entry, a table of commands. Only the module of the command that was asked for is imported."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import select
import signal
import sys
from typing import NoReturn

from cb_backend import __version__
from cb_backend.cli.paths import CliError
from cb_backend.contracts.errors import CbError

COMMANDS = {
    "serve": "start a Triton server on a model repository and stay with it",
    "demo": "start a server, stream several prompts at once, show the batch change, stop",
    "check": "what a checkpoint is, whether it will be served, how much of a card it takes; needs no GPU",
    "plan": "ways to spread a model over several GPUs of a host, and which one to take; needs no GPU",
    "adapters": "which adapters (LoRA) a model names, and what would be refused of them; needs no GPU",
    "bench": "measure the engine",
    "openai": "OpenAI's HTTP API in front of a Triton server",
    "chat": "talk with a model on the terminal",
    "status": "what runs here, on which ports, how full it is and how fast",
    "doctor": "what keeps a server from starting or serving here, and what to do about it",
    "models": "checkpoints on this machine's disk: list, fetch, remove",
    "study": "what in-flight batching gains on your own traffic, and which settings to run it with",
    "cache": "have a running engine forget its prefix cache",
    "sleep": "have a model give its card's memory back until its next request",
    "wake": "have a sleeping model be ready before its next request",
    "update": "serve the weights of another checkpoint of the same model, without a restart",
    "install": "make the package a backend of an installed server",
    "timeline": "draw who was in the batch, token by token: of a running engine, a saved log, or a demo",
}

HANDS_ON = ("serve",)  # commands that give what follows `--` to another program


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns its exit code; 1 with a one-line reason where it cannot go on, 2 for wrong usage."""
    arguments = sys.argv[1:] if argv is None else argv
    name = arguments[0] if arguments and arguments[0] in COMMANDS else None
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # it tells of every fork beside its threads
    try:
        args = _parse(name, arguments)  # imports the command, which may take seconds: Ctrl-C may come here as well
        if name is None:
            _parser(None).print_help()
            return 2
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except (CliError, CbError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError as error:
        if _has_reader():
            print(f"error: {error}", file=sys.stderr)  # of a connection
            return 1
        return 128 + signal.SIGPIPE  # `| head` has what it wants: as other tools end then
    except OSError as error:  # a folder that is not there, a full disk, a file of somebody else
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _has_reader() -> bool:
    """Whether somebody still takes what is printed; if not, the interpreter's last flush must not complain of it."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # no file of the system's
        return True
    poll = select.poll()
    poll.register(output, select.POLLOUT)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return True
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return False


def _parse(name: str | None, arguments: list[str]) -> argparse.Namespace:
    """What a wrong argument is told is the usage of the command that it was given to."""
    own, handed_on = arguments, []
    if name in HANDS_ON and "--" in arguments:
        position = arguments.index("--")
        own, handed_on = arguments[:position], arguments[position + 1 :]
    args, unknown = _parser(name).parse_known_args(own)
    if unknown:
        parser = args.command_parser if name is not None else _parser(None)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_suggestion(parser, unknown)}")
    args.handed_on = handed_on
    return args


def _suggestion(parser: argparse.ArgumentParser, unknown: list[str]) -> str:
    flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    known = re.findall(r"--[a-z][\w-]*", parser.format_help())
    close = [near for flag in flags for near in difflib.get_close_matches(flag.replace("_", "-"), known, n=1)]
    return f"; did you mean {', '.join(close)}?" if close else ""


class _Parser(argparse.ArgumentParser):
    """Commands have a `usage` of their own where options would take more than a line: errors must not scroll away. What
    was wrong comes last, where tools that show one line of an error look."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"({self.prog} --help says more)\n{self.prog}: error: {message}\n")


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = _Parser(prog="cb-backend", description="LLM serving inside NVIDIA Triton Inference Server")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == chosen:
            module = importlib.import_module(f"cb_backend.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run, command_parser=command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
