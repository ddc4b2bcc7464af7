"""The process that renders chat templates: `python template_worker.py SECONDS`, one JSON line in, one JSON line out.

A template is a program that came with a checkpoint. It runs in Jinja's sandbox, and the sandbox in a process that may
not write files, open anything, start processes or take much memory, and that its parent kills when it takes too long.
It ends with its input, or after SECONDS of computing at one line: its parent may have been killed meanwhile. This
script imports nothing of the package, so that it starts quickly.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

import jinja2.debug  # noqa: F401 Jinja imports it at the first error, when files are out of reach
from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 30  # of address space
CONSTANTS = ("raise_exception", "strftime_now", "range", "dict", "namespace")


# Run once while Python can still import what it imports at first use.
_WARM_UP = r"""{% set n = namespace(a='\n\u00e9') %}{% macro f(x) %}{{ x }}{% endmacro %}{{ f(1) ~ n.a | trim }}
{%- for i in range(2) %}{{ loop.index0 }}{% if loop.first %}{% continue %}{% endif %}{% endfor %}
{{- {'a': 1.5} | tojson(indent=2) }}{{ 'x'.split('y')[0].encode() }}{{ strftime_now('%d %b %Y') }}"""


class _RaisedError(TemplateError):
    """A template refused its input by `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}` marks what a model said, for training; here it is only a block."""

    tags = {"generation"}  # noqa: RUF012 as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def main() -> None:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    for name in ("lipsum", "cycler", "joiner"):  # not for prompts
        del environment.globals[name]
    datetime.datetime.now().strftime("%c")  # the time zone and the locale are read before files are out of reach
    lines = sys.stdin.buffer
    limit_s = float(sys.argv[1])
    source = json.loads(lines.readline())
    signal.setitimer(signal.ITIMER_PROF, limit_s)  # nobody handles its signal, so the kernel ends the process
    _limit_memory_and_writing()
    try:
        template = environment.from_string(source)
        variables = sorted(meta.find_undeclared_variables(environment.parse(source)) - set(CONSTANTS))
        environment.from_string(_WARM_UP).render()
    except MemoryError:
        _answer({"error": "out of memory"})
        return
    except Exception as error:
        _answer({"error": _words(error)})
        return
    _take_files_away()
    _answer({"variables": variables})
    while line := lines.readline():
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            _answer({"text": template.render(json.loads(line))})
        except _RaisedError as error:
            _answer({"refusal": str(error)})
        except MemoryError:
            _answer({"error": "out of memory"})
        except RecursionError:
            _answer({"error": "it calls itself too deeply"})
        except Exception as error:
            _answer({"error": _words(error)})


def _limit_memory_and_writing() -> None:
    """Before a template is compiled: constants are computed then."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _take_files_away() -> None:
    """Before a template runs: stdin, stdout and stderr are open, and there is no file and no socket beside them."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


def _words(error: Exception) -> str:
    """What an error says, unless that may be a path."""
    text = str(error)
    return type(error).__name__ if "/" in text else f"{type(error).__name__}: {text}"


def _answer(values: dict[str, Any]) -> None:
    data = json.dumps(values).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


def _raise(message: object) -> NoReturn:
    raise _RaisedError(str(message))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """As transformers has it: no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


if __name__ == "__main__":
    main()
