"""Message texts on Django's template engine: a path looks up items only, and nothing is loaded, called or included."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from django.template import Engine, Node, NodeList, Template, TemplateSyntaxError
from django.template.base import FilterExpression, Lexer, Parser, TextNode, Token, TokenType, Variable, VariableNode
from django.utils.safestring import SafeString

from scheduling.error_text import ErrorText as _
from scheduling.templating.library import (
    ARGUMENTS,
    MAX_DEPTH,
    MISSING,
    READ,
    CannotRender,
    InvalidTemplate,
    check_length,
    default,
)

MAX_SOURCE = 32_768  #: characters
MAX_TAGS = 500
MAX_TAG = 500  #: characters

#: Variables and their fields; an empty set allows any field. Only the event itself determines `event.data`.
VARIABLES: Mapping[str, frozenset[str]] = {
    "customer": frozenset({"attributes", "tags"}),
    "user": frozenset({"id", "name", "level", "locale", "timezone"}),
    "event": frozenset({"id", "source", "type", "time", "data"}),
    "chat": frozenset({"id"}),
}
FORLOOP = frozenset({"counter", "counter0", "revcounter", "revcounter0", "first", "last"})
OPENING = re.compile(r"\{[{%#]")
ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class Path(Variable):
    """A variable with keys. It has no attributes and calls nothing."""

    __slots__ = ()

    def _resolve_lookup(self, context: Any) -> Any:
        lookups: Any = self.lookups
        try:
            value = context[lookups[0]]
            for step in lookups[1:]:
                if isinstance(value, dict):
                    value = value[step]
                elif isinstance(value, list | tuple):
                    value = value[int(step)]
                else:
                    return MISSING
        except (LookupError, ValueError):
            return MISSING
        return value


class Expression(FilterExpression):
    """A path or a constant with filters."""

    __slots__ = ("path",)

    def __init__(self, token: str, parser: TextParser) -> None:
        if token.startswith("_(") or ":_(" in token:
            raise TemplateSyntaxError
        super().__init__(token, parser)
        self.path = token
        if self.is_var:
            self.path, self.var = self.var.var, parser.read_path(self.var)
        for function, arguments in self.filters:
            arguments[:] = [(is_path, parser.read_path(each) if is_path else each) for is_path, each in arguments]
            if function is not default:
                self._check_arguments(function._filter_name, arguments)
        if any(function._filter_name == "join" for function, *_arguments in self.filters[:-1]):
            raise InvalidTemplate(_("“join” must be the last filter: it escapes the entries"))

    def _check_arguments(self, name: str, arguments: list[tuple[bool, Any]]) -> None:
        for is_path, each in arguments:
            if is_path and each.lookups is not None:
                raise InvalidTemplate(_("“%(name)s” takes a text in quotes or a number", name=name))
            if not ARGUMENTS[name].fullmatch(argument := str(each.literal if is_path else each)):
                raise InvalidTemplate(_("“%(name)s” does not take “%(given)s”", name=name, given=argument[:60]))

    def resolve(self, context: Any, ignore_failures: bool = False) -> Any:
        """Return the value, also in `if`. Raises `CannotRender` if it is missing or null, or a filter fails."""
        context.spend(READ)
        context.path = self.path
        value = self.var.resolve(context) if self.is_var else self.var
        try:
            for function, arguments in self.filters:
                if function is not default:
                    context.check_present(value)
                given = [each.resolve(context) if is_path else each for is_path, each in arguments]
                value = function(value, *given, run=context)
                if isinstance(value, str):
                    check_length(value)
            context.check_present(value)
        except ERRORS as error:
            raise CannotRender(_("“%(given)s” %(problem)s", given=self.path, problem=error)) from None
        return value


class Printed(Node):
    """The part of a text that prints a value, escaped. Constants are the author's and stay."""

    child_nodelists = ()

    def __init__(self, expression: Any) -> None:
        self.expression = expression

    def render(self, context: Any) -> str:
        text = context.read_text(self.expression.resolve(context))
        return str(text if isinstance(text, SafeString) else context.escape(text))


class TextParser(Parser):
    """Refuse names that do not exist, and what is not closed."""

    def __init__(self, tokens: list[Token], variables: Mapping[str, frozenset[str]]) -> None:
        super().__init__(tokens, builtins=ENGINE.template_builtins)
        self.roots: set[str] = set()
        self.loop = ""  #: the name of the loop that is being read
        self._variables = variables
        self._depth = 0

    def parse(self, parse_until: Any = None) -> NodeList:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise InvalidTemplate(_("it is nested too deeply"))
        nodes = super().parse(parse_until)
        self._depth -= 1
        return nodes

    def extend_nodelist(self, nodelist: NodeList, node: Any, token: Any) -> None:
        if isinstance(node, TextNode) and (stray := OPENING.search(node.s)):
            token.lineno += node.s.count("\n", 0, stray.start())
            raise self.error(token, InvalidTemplate(_("“%(name)s” is not closed on its line", name=stray[0])))
        if isinstance(node, VariableNode):
            node = Printed(node.filter_expression)
        super().extend_nodelist(nodelist, node, token)

    def compile_filter(self, token: str) -> Expression:
        return Expression(token, self)

    def find_filter(self, filter_name: str) -> Any:
        if filter_name not in self.filters:
            known = ", ".join(sorted(self.filters))
            raise InvalidTemplate(
                _("unknown filter “%(name)s”; available: %(known)s", name=filter_name[:60], known=known)
            )
        return self.filters[filter_name]

    def read_path(self, variable: Any) -> Path:
        """Return the path or number, whose variable and field exist."""
        path = Path(variable.var)
        if path.lookups is None:
            return path
        root, *steps = path.lookups
        known = {**self._variables, **({self.loop: frozenset(), "forloop": FORLOOP} if self.loop else {})}
        fields = known.get(root)
        if fields is None:
            available = ", ".join(sorted(known))
            raise InvalidTemplate(
                _("unknown variable “%(name)s”; available: %(known)s", name=root[:60], known=available)
            )
        if fields and steps and steps[0] not in fields:
            name, available = f"{root}.{steps[0]}"[:60], ", ".join(sorted(fields))
            raise InvalidTemplate(
                _("unknown variable “%(name)s”; %(root)s has %(known)s", name=name, root=root, known=available)
            )
        self.roots.add(root)
        return path

    def invalid_block_tag(self, token: Token, command: str, parse_until: Any = None) -> Any:
        problem = _("“%(name)s” is not part of the template language", name=command[:60])
        raise self.error(token, InvalidTemplate(problem))

    def unclosed_block_tag(self, parse_until: Any) -> Any:
        command, token = self.command_stack.pop()
        raise self.error(token, InvalidTemplate(_("“%(name)s” has no end", name=command)))


class TextEngine(Engine):
    """An engine without loaders, whose only library is ours."""

    default_builtins: ClassVar[list[str]] = ["scheduling.templating.library"]


ENGINE = TextEngine(loaders=[])


class Text(Template):
    """A compiled text."""

    def __init__(self, source: str, variables: Mapping[str, frozenset[str]] = VARIABLES) -> None:
        """Compile a text with these variables and their fields.

        Raises:
            InvalidTemplate: with the line.
        """
        self._variables = variables
        self.roots: frozenset[str] = frozenset()  #: the variables that the text reads
        lines = source.replace("\r\n", "\n").replace("\r", "\n")
        super().__init__(lines.removesuffix("\n"), engine=ENGINE)

    def compile_nodelist(self) -> NodeList:
        if len(self.source) > MAX_SOURCE:
            raise InvalidTemplate(_("must not be longer than %(most)s characters", most=MAX_SOURCE))
        if len(OPENING.findall(self.source)) > MAX_TAGS:  # before the lexer, which takes long for many without an end
            raise InvalidTemplate(_("a text must not have more than %(most)s tags", most=MAX_TAGS))
        tokens = Lexer(self.source).tokenize()
        if long := [each for each in tokens if each.token_type != TokenType.TEXT and len(each.contents) > MAX_TAG]:
            what = _("a tag must not be longer than %(most)s characters", most=MAX_TAG)
            raise InvalidTemplate(_("line %(line)s: %(what)s", line=long[0].lineno, what=what))
        parser = TextParser(tokens, self._variables)
        try:
            nodes = parser.parse()
        except RecursionError:
            raise InvalidTemplate(_("it is nested too deeply")) from None
        except TemplateSyntaxError as error:
            token: Any = getattr(error, "token")  # noqa: B009  set by the parser
            problem = str(error)
            if not isinstance(error, InvalidTemplate):
                name = token.contents[:60]
                problem = _('“%(name)s” cannot be read; write filters like x|default:"-"', name=name)
            raise InvalidTemplate(_("line %(line)s: %(what)s", line=token.lineno, what=problem)) from None
        self.roots = frozenset(parser.roots)
        return nodes

    def render(self, context: Any) -> Any:
        """Return the text. Raises `CannotRender`."""
        context.template = self
        try:
            text = "".join([str(node.render_annotated(context)) for node in self.nodelist])
        except ERRORS as error:
            raise CannotRender(f"{type(error).__name__}: {error}") from None
        return check_length(text)
