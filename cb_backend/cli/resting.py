"""Tells every engine of a model the same thing about its rest, and people what came of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from cb_backend.cli.engine_choice import add_model_argument, chosen_model
from cb_backend.contracts.errors import UnavailableError
from cb_backend.contracts.rest import RestAnswer
from cb_backend.front_end.engines.engine_observer import CalledOff, set_rest
from cb_backend.front_end.engines.runtime_dir import EngineLife
from cb_backend.support.argument_types import positive_float

SEE = "cb-backend status shows what it does"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `sleep` and `wake`."""
    parser.usage = "%(prog)s MODEL [options]"
    add_model_argument(parser)
    parser.add_argument(
        "--timeout", type=positive_float, default=60.0, metavar="S", help="after which it is called off (%(default)g)"
    )


def order(args: argparse.Namespace, is_asleep: bool, done: str) -> int:
    """Sleep, or wake: the exit code, as `told_all` has it."""
    return told_all(chosen_model(args), lambda life: set_rest(life, is_asleep, args.timeout), done)


def told_all(engines: Sequence[EngineLife], tell: Callable[[EngineLife], RestAnswer], done: str) -> int:
    """`done` is what an engine is afterwards. The exit code: 1 if one is not. Ctrl-C calls off what has not begun."""
    exit_code = 0
    for life in engines:
        try:
            answer = tell(life)
        except UnavailableError as error:
            answer = RestAnswer("", f"{error} What has begun goes on; {SEE}")
        except CalledOff as interrupt:
            problem = "what has begun goes on" if interrupt.answer is None else interrupt.answer.problem
            print(f"engine {life.pid} is {f'not {done}: {problem}' if problem else done}; {SEE}", file=sys.stderr)
            raise
        if answer.problem:
            print(f"error: engine {life.pid} is not {done}: {answer.problem}", file=sys.stderr)
            exit_code = 1
        else:
            print(f"engine {life.pid} is {done}" + (f" ({answer.seconds:.2f} s)" if answer.seconds else ""))
    return exit_code
