"""Compile and render message templates: a subset of Jinja with bounded work and memory.

Jinja's parser reads the text. Closures evaluate the accepted nodes. A path looks up items only, so a text reaches no
attribute and no method of a Python object. `docs/reference/templates.md` lists the constructs and the limits.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateSyntaxError, nodes

from scheduling.templating.values import (
    FILTERS,
    JINJA,
    MAX_NAME,
    MAX_NUMERAL,
    NUMBER_FORMAT,
    CannotRender,
    Missing,
    Run,
    apply_default,
    check_found_value,
    check_list_value,
    check_number,
    check_present_value,
    check_single_value,
    check_text_length,
    contains_value,
    read_as_text,
    to_text,
)

MAX_SOURCE = 32_768  #: characters
MAX_TOKENS = 4_000
MAX_DEPTH = 40  #: nested nodes
MIN_ROUND = 10  #: units

#: Variables and their fields; an empty set allows any field. Only the event itself determines `event.data`.
VARIABLES: Mapping[str, frozenset[str]] = {
    "customer": frozenset({"attributes", "tags"}),
    "user": frozenset({"id", "name", "level", "locale", "timezone"}),
    "event": frozenset({"id", "source", "type", "time", "data"}),
    "chat": frozenset({"id"}),
}
LOOP = frozenset({"index", "first", "last"})

_STRFTIME = re.compile(r"(?:[^%]|%-?[aAbBdmyYHIMSpjzZfuwUWVGcxX%]){0,100}")

#: By Jinja's names.
_ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "%": operator.mod}
_COMPARISONS = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "lteq": operator.le, "gt": operator.gt,
                "gteq": operator.ge}  # fmt: skip

Names = Mapping[str, Any]
LookUp = Callable[[Names], Any]
Evaluate = Callable[["Run"], Any]
Execute = Callable[["Run"], None]


class InvalidTemplate(ValueError):
    """The text is not in the template language. The message names the line."""


class Program:
    """A compiled text.

    Most texts are plain: they print literal text and paths. Such a text needs no `Run`.
    """

    __slots__ = ("_parts", "_plain", "roots")

    def __init__(self, parts: list[str | Execute], roots: Iterable[str] = ()) -> None:
        self._parts = parts
        self.roots = frozenset(roots)  #: the variables that the text reads
        self._plain: list[str | Callable[[Names], str]] = []
        if all(isinstance(part, str | PrintedPath) for part in parts):
            self._plain = [part.read if isinstance(part, PrintedPath) else str(part) for part in parts]

    def render(self, names: dict[str, Any]) -> str:
        """Return the text. `names` maps each of `VARIABLES` to its fields, unchanged. Raises `CannotRender`."""
        try:
            pieces = [part if isinstance(part, str) else part(names) for part in self._plain]
            if not pieces:
                run = Run(names)
                _run_parts(self._parts, run)
                pieces = run.pieces
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise CannotRender(f"{type(error).__name__}: {error}") from None
        check_text_length(sum(map(len, pieces)))
        return "".join(pieces)


class PrintedPath:
    """The part of a text that prints the value of a path."""

    __slots__ = ("read",)

    def __init__(self, look_up: LookUp, path: str) -> None:
        def read(names: Names) -> str:
            value = look_up(names)
            return value if type(value) is str else to_text(value, path)

        self.read = read

    def __call__(self, run: Run) -> None:
        run.pieces.append(self.read(run.names))


def compile_text(source: str, variables: Mapping[str, frozenset[str]] = VARIABLES) -> Program:
    """Compile a text with these variables and their fields. Raises `InvalidTemplate`."""
    try:
        _check_tokens(source)
        tree = JINJA.parse(source)
        _check_depth(tree)
        compiler = _Compiler(variables)
        return Program(compiler.compile_body(tree.body), compiler.roots)
    except TemplateSyntaxError as error:
        raise InvalidTemplate(f"line {error.lineno}: {error.message}") from None
    except RecursionError:
        raise InvalidTemplate("it is nested too deeply") from None


def _check_tokens(source: str) -> None:
    """Bound the work of the parser."""
    if len(source) > MAX_SOURCE:
        raise InvalidTemplate(f"must not be longer than {MAX_SOURCE} characters")
    for number, (line, kind, token) in enumerate(JINJA.lex(source)):
        if number >= MAX_TOKENS:
            raise InvalidTemplate(f"line {line}: a text must not have more than {MAX_TOKENS} tokens")
        limit = {"integer": MAX_NUMERAL, "float": MAX_NUMERAL, "name": MAX_NAME}.get(kind, MAX_SOURCE)
        if len(token) > limit:
            raise InvalidTemplate(f"line {line}: a number or a name must not be longer than {limit} characters")


def _check_depth(tree: nodes.Template) -> None:
    level: list[nodes.Node] = tree.body
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in node.iter_child_nodes()]
    if level:
        _reject(level[0], "it is nested too deeply")


def _reject(node: nodes.Node, reason: str = "") -> NoReturn:
    reason = reason or f"“{type(node).__name__.lower()}” is not part of the template language"
    raise InvalidTemplate(f"line {node.lineno}: {reason}")


class _Compiler:
    """Turn nodes into closures."""

    def __init__(self, variables: Mapping[str, frozenset[str]]) -> None:
        self._outer = self._variables = variables
        self.roots: set[str] = set()

    def compile_body(self, body: Iterable[nodes.Node]) -> list[str | Execute]:
        parts: list[str | Execute] = []
        for node in body:
            match node:
                case nodes.Output():
                    parts += [self._compile_output(each) for each in node.nodes]
                case nodes.If():
                    parts.append(self._compile_if(node))
                case nodes.For():
                    parts.append(self._compile_for(node))
                case _:
                    _reject(node)
        return parts

    def _compile_output(self, node: nodes.Expr) -> str | Execute:
        if isinstance(node, nodes.TemplateData):
            return node.data
        if isinstance(node, nodes.Name | nodes.Getattr | nodes.Getitem):
            return PrintedPath(self._compile_path(node), _path(node))
        evaluate, path = self._compile(node), _path(node)

        def write(run: Run) -> None:
            value = evaluate(run)
            run.pieces.append(value if type(value) is str else to_text(value, path))

        return write

    def _compile_if(self, node: nodes.If) -> Execute:
        branches = [(self._require(each.test), self.compile_body(each.body)) for each in (node, *node.elif_)]
        branches.append((lambda run: True, self.compile_body(node.else_)))

        def choose(run: Run) -> None:
            _run_parts(next(body for test, body in branches if test(run)), run)

        return choose

    def _compile_for(self, node: nodes.For) -> Execute:
        if node.find(nodes.For):
            _reject(node, "a loop must not contain another loop")
        if not isinstance(node.target, nodes.Name) or node.recursive or node.else_:
            _reject(node, "a loop takes one name, without “recursive” and “else”")
        name, entries_of, path = node.target.name, self._require(node.iter), _path(node.iter)
        self._variables = {**self._outer, name: frozenset()}
        test = self._require(node.test) if node.test else None
        self._variables = {"loop": LOOP, **self._variables}
        body = self.compile_body(node.body)
        self._variables = self._outer
        cost = MIN_ROUND + sum(1 for _ in node.find_all(nodes.Node))

        def loop(run: Run) -> None:
            names = run.names
            entries = []
            for entry in check_list_value(entries_of(run), path):
                run.spend(cost)
                run.names = {**names, name: entry}
                if test is None or test(run):
                    entries.append(entry)
            for index, entry in enumerate(entries, start=1):
                position = {"index": index, "first": index == 1, "last": index == len(entries)}
                run.names = {**names, "loop": position, name: entry}
                _run_parts(body, run)
            run.names = names

        return loop

    def _compile(self, node: nodes.Node) -> Evaluate:  # noqa: C901, PLR0911, PLR0912 (a case for each token)
        """Compile an expression whose value may be missing."""
        match node:
            case nodes.Const(value=value):
                return lambda run: value
            case nodes.Name() | nodes.Getattr() | nodes.Getitem():
                look_up = self._compile_path(node)
                return lambda run: look_up(run.names)
            case nodes.Filter(name="format"):
                return self._compile_format(node)
            case nodes.Filter(node=nodes.Node() as inner):
                return self._compile_filter(node, inner)
            case nodes.Test(name="none"):
                nullable = self._require(node.node)
                return lambda run: nullable(run) is None
            case nodes.Test(name="defined" | "undefined" as name):
                evaluate, wanted = self._compile(node.node), name == "undefined"
                return lambda run: isinstance(evaluate(run), Missing) is wanted
            case nodes.Test():
                _reject(node, f"unknown filter or test “{node.name}”; there are defined, none, undefined")
            case nodes.Compare(ops=[nodes.Operand()]):
                return self._compile_comparison(node)
            case nodes.Not():
                negated = self._require(node.node)
                return lambda run: not negated(run)
            case nodes.And() | nodes.Or():
                left, right, stops = self._require(node.left), self._compile(node.right), isinstance(node, nodes.Or)
                return lambda run: value if bool(value := left(run)) is stops else right(run)
            case nodes.CondExpr(expr2=nodes.Node() as otherwise):
                test, first, second = self._require(node.test), self._compile(node.expr1), self._compile(otherwise)
                return lambda run: first(run) if test(run) else second(run)
            case nodes.BinExpr() if node.operator in _ARITHMETIC:
                return self._compile_arithmetic(node)
            case nodes.Neg():
                operand = self._require(node.node)
                return lambda run: -check_number(operand(run))
            case nodes.Call():
                return self._compile_strftime(node)
        _reject(node)

    def _require(self, node: nodes.Node) -> Evaluate:
        """Compile an expression whose value must not be missing."""
        evaluate = self._compile(node)
        return lambda run: check_found_value(evaluate(run))

    def _compile_path(self, node: nodes.Expr) -> LookUp:
        root, *steps = _steps(node) or _reject(node)
        fields = self._variables.get(root)
        if fields is None:
            _reject(node, f"unknown variable “{root}”; available: {', '.join(sorted(self._variables))}")
        if fields and steps and steps[0] not in fields:
            _reject(node, f"unknown variable “{root}.{steps[0]}”; {root} has {', '.join(sorted(fields))}")
        missing = Missing(_path(node))
        self.roots.add(root)

        def look_up(names: Names) -> Any:
            value = names[root]
            try:
                for step in steps:
                    value = value[step]
            except (LookupError, TypeError):
                return missing
            return value

        return look_up

    def _compile_filter(self, node: nodes.Filter, inner: nodes.Node) -> Evaluate:
        function = FILTERS.get(node.name)
        if function is None:
            _reject(node, f"unknown filter or test “{node.name}”; available: {', '.join(sorted([*FILTERS, 'format']))}")
        named: dict[str, nodes.Expr] = {each.key: each.value for each in node.kwargs}  # type: ignore[misc]  # wrong stub
        if node.dyn_args or node.dyn_kwargs:
            _reject(node)
        try:
            bound = inspect.signature(function).bind(None, None, *node.args, **named)
        except TypeError as error:
            _reject(node, f"“{node.name}”: {error}")
        arguments = [(name, self._require(each)) for name, each in [*bound.arguments.items()][2:]]
        evaluate, path = self._compile(inner), _path(inner)

        def apply(run: Run) -> Any:
            value = evaluate(run)
            run.spend(1)
            if function is not apply_default:
                check_present_value(value, path)
            found = function(run, value, **{name: each(run) for name, each in arguments})
            return read_as_text(run, found) if isinstance(found, str) and found is not value else found

        return apply

    def _compile_format(self, node: nodes.Filter) -> Evaluate:
        match node:
            case nodes.Filter(node=nodes.Const(value=str() as form), args=[value], kwargs=[], dyn_args=None,
                              dyn_kwargs=None) if NUMBER_FORMAT.fullmatch(form):  # fmt: skip
                evaluate = self._require(value)
                return lambda run: read_as_text(run, form % check_number(evaluate(run)))
        _reject(node, "“format” takes a format of one number, such as '%.2f' or '%03d', and the number")

    def _compile_comparison(self, node: nodes.Compare) -> Evaluate:
        left, operand = self._require(node.expr), node.ops[0]
        if operand.op not in ("in", "notin"):
            compare, right = _COMPARISONS[operand.op], self._require(operand.expr)
            return lambda run: compare(check_single_value(run, left(run)), check_single_value(run, right(run)))
        negated = operand.op == "notin"
        if isinstance(operand.expr, nodes.List | nodes.Tuple):
            entries = [self._require(each) for each in operand.expr.items]
            return lambda run: contains_value(run, [each(run) for each in entries], left(run)) is not negated
        whole = self._require(operand.expr)
        return lambda run: contains_value(run, whole(run), left(run)) is not negated

    def _compile_arithmetic(self, node: nodes.BinExpr) -> Evaluate:
        if any(isinstance(each, nodes.Const) and isinstance(each.value, str) for each in (node.left, node.right)):
            _reject(node, "only numbers can be calculated with")
        calculate, left, right = _ARITHMETIC[node.operator], self._require(node.left), self._require(node.right)
        return lambda run: check_number(calculate(check_number(left(run)), check_number(right(run))))

    def _compile_strftime(self, node: nodes.Call) -> Evaluate:
        match node:
            case nodes.Call(node=nodes.Getattr(node=inner, attr="strftime"), args=[nodes.Const(value=str() as form)],
                            kwargs=[], dyn_args=None, dyn_kwargs=None) if _STRFTIME.fullmatch(form):  # fmt: skip
                evaluate, path = self._require(inner), _path(inner)
            case _:
                _reject(node, "only event.time.strftime('%Y-%m-%d %H:%M') can be called; filters do other work")

        def format_time(run: Run) -> str:
            value = evaluate(run)
            if not isinstance(value, datetime):
                raise CannotRender(f"“{path}” is not an instant")
            run.spend(len(form))
            return value.strftime(form)

        return format_time


def _steps(node: nodes.Node) -> list[Any]:
    """Return the variable and the constant keys of a path; nothing for another expression."""
    match node:
        case nodes.Name(name=step):
            return [step]
        case (
            nodes.Getattr(node=inner, attr=step)
            | nodes.Getitem(node=inner, arg=nodes.Const(value=str(step) | int(step)))
        ):
            before = _steps(inner)
        case nodes.Getitem(node=inner, arg=nodes.Neg(node=nodes.Const(value=int(index)))):
            before, step = _steps(inner), -index
        case _:
            return []
    return before and [*before, step]


def _path(node: nodes.Node) -> str:
    """Return the name of an expression in messages."""
    return ".".join(map(str, _steps(node))) or "…"


def _run_parts(parts: list[str | Execute], run: Run) -> None:
    for part in parts:
        if type(part) is str:
            run.pieces.append(part)
        else:
            part(run)  # type: ignore[operator]


# --- filters ----------------------------------------------------------------------------------------------------------
