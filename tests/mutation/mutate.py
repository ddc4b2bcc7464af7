"""Small changes of a module's source, one at a time: what a careless edit might do to it.

Comparisons and arithmetic change their sign or border, `and` and `or` change places, `not` goes, numbers grow by one,
truth is turned round, statements are left out. Not touched: assertions, `check_integrity`, texts, annotations.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Div: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_SKIPPED_FUNCTIONS = ("check_integrity", "__repr__")


@dataclass(frozen=True)
class Mutant:
    """One change: where it is, and what it does."""

    index: int
    line: int
    source: str  # the line
    what: str


def mutants(source: str) -> list[Mutant]:
    """All changes that can be made, in order."""
    lines = source.splitlines()
    sites = enumerate(_sites(ast.parse(source)))
    return [Mutant(i, node.lineno, lines[node.lineno - 1].strip(), what) for i, (node, what, _) in sites]


def mutated(source: str, index: int) -> ast.Module:
    """The module with change number `index`."""
    tree = ast.parse(source)
    for i, (_, _, change) in enumerate(_sites(tree)):
        if i == index:
            change()
            break
    return ast.fix_missing_locations(tree)


def _sites(tree: ast.Module) -> Iterator[tuple]:
    """(node, description, function that makes the change)."""
    for parent in _walk(tree):
        for name, value in ast.iter_fields(parent):
            is_signature = name == "args" and not isinstance(parent, ast.Call)
            if is_signature or name in ("annotation", "returns", "decorator_list"):
                continue
            items = value if isinstance(value, list) else [value]
            for place, node in enumerate(items):
                if isinstance(node, ast.AST):
                    yield from _changes(parent, name, place if isinstance(value, list) else None, node)


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Assert | ast.AnnAssign | ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr):
            continue
        if isinstance(node, ast.FunctionDef) and node.name in _SKIPPED_FUNCTIONS:
            continue
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
            continue
        yield node
        stack.extend(reversed([child for child in ast.iter_child_nodes(node) if child not in _annotations(node)]))


def _annotations(node: ast.AST) -> list[ast.AST]:
    return [getattr(node, name) for name in ("annotation", "returns") if getattr(node, name, None) is not None]


def _changes(parent: ast.AST, name: str, place: int | None, node: ast.AST) -> Iterator[tuple]:
    def put(new: ast.AST) -> None:
        if place is None:
            setattr(parent, name, new)
        else:
            getattr(parent, name)[place] = new

    text = ast.unparse(node).splitlines()[0][:70] if isinstance(node, ast.expr | ast.stmt) else ""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        new = copy.deepcopy(node)
        new.ops = [_COMPARISONS[type(node.ops[0])]()]
        yield node, f"{text} -> {ast.unparse(new)[:70]}", lambda: put(new)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        other = copy.deepcopy(node)
        other.op = _OPERATORS[type(node.op)]()
        yield node, f"{text} -> {ast.unparse(other)[:70]}", lambda: put(other)
    elif isinstance(node, ast.BoolOp):
        turned = copy.deepcopy(node)
        turned.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, f"{text} -> {ast.unparse(turned)[:70]}", lambda: put(turned)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"{text} -> without not", lambda: put(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, f"{text} -> {not node.value}", lambda: put(ast.Constant(not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node, f"{text} -> {node.value + 1}", lambda: put(ast.Constant(node.value + 1))
    elif isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
        augmented = copy.deepcopy(node)
        augmented.op = _OPERATORS[type(node.op)]()
        yield node, f"{text} -> {ast.unparse(augmented)[:70]}", lambda: put(augmented)
    elif _is_left_out(node):
        yield node, f"{text} -> left out", lambda: put(ast.Pass())
    elif isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
        test = node.test
        yield node, f"{text} -> not", lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), test))


def _is_left_out(node: ast.AST) -> bool:
    """Whether the statement can go: a call for its effect, a change of state, a jump."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    return isinstance(node, ast.Continue | ast.Break)
