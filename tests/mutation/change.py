"""Puts one change of a module into effect in a process that has imported it, or before it is imported.

A change inside functions becomes the code of the functions as they are: whoever has imported them has it at once, and
nothing needs to be imported again. What a module does while it is imported (constants, defaults, decorators) has to be
done anew.
"""

from __future__ import annotations

import ast
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from tests.mutation.mutate import mutated
from tests.mutation.targets import source_of

_Place = tuple[str, int]  # name and first line of a function


class Living:
    """The functions of a module that exist now. To be made after all that uses them has been imported."""

    def __init__(self, module: str) -> None:
        self._path = source_of(module)
        self._source = self._path.read_text()
        self._functions: dict[_Place, list[FunctionType]] = {}
        for found in gc.get_objects():
            if type(found) is FunctionType and found.__code__.co_filename == str(self._path):
                self._functions.setdefault(_place(found.__code__), []).append(found)

    def change(self, index: int) -> bool:
        """Make change number `index`. False, and nothing is changed, if that takes a new import."""
        before = compile(ast.parse(self._source), str(self._path), "exec")
        after = compile(mutated(self._source, index), str(self._path), "exec")
        if _without_functions(before) != _without_functions(after):
            return False
        old, new = ({_place(made): made for made in _functions_in(code)} for code in (before, after))
        if not {place for place, code in new.items() if code != old[place]} <= self._functions.keys():
            return False  # something that ran once
        for place, code in new.items():
            for function in self._functions.get(place, ()):
                function.__code__ = code
        return True


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with one change in it."""

    def __init__(self, module: str, index: int) -> None:
        self.module, self.index = module, index
        self.path = source_of(module)

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module) -> None:
        exec(compile(mutated(self.path.read_text(), self.index), str(self.path), "exec"), module.__dict__)


def import_anew(module: str, index: int) -> None:
    """Whatever is imported from now on is of the changed module."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("cb_backend", "tests")]:
        del sys.modules[name]
    sys.meta_path.insert(0, Changed(module, index))


def _place(code: CodeType) -> _Place:
    return code.co_qualname, code.co_firstlineno


def _is_function(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_OPTIMIZED)  # bodies of classes and modules are not


def _functions_in(code: CodeType) -> Iterator[CodeType]:
    """Those of a module and its classes; functions inside functions are part of these."""
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from [const] if _is_function(const) else _functions_in(const)


def _without_functions(code: CodeType) -> tuple[Any, ...]:
    """What a module or a class does when it is made."""
    consts = [
        (None if _is_function(const) else _without_functions(const))
        if isinstance(const, CodeType)
        else (type(const), const)
        for const in code.co_consts
    ]
    return code.co_code, code.co_names, tuple(consts)
