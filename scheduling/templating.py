"""Compile and render message templates. Missing data fails the touch, so that no incomplete text is sent.

Texts use Django's template engine with a closed library: what a value prints as, the filters, `if`, and one level of
`for`. `docs/reference/templates.md` lists them with their limits. No tag and no filter of Django's own library is
loaded. A path looks up items only, and nothing is called or included.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal, InvalidOperation
from functools import lru_cache, wraps
from types import SimpleNamespace
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from django.conf import settings
from django.template import Engine, Library, Node, NodeList, Template, TemplateSyntaxError, defaultfilters
from django.template.base import FilterExpression, Lexer, Parser, TextNode, Token, TokenType, Variable, VariableNode
from django.template.context import BaseContext
from django.template.defaulttags import IfNode, do_for, do_if
from django.utils import dateformat
from django.utils.formats import get_format
from django.utils.safestring import SafeString
from django.utils.translation import override

from scheduling.error_text import ErrorText as _
from scheduling.policy.specs import CustomerSpec, EventSpec, TemplateSpec, TextSpec

MAX_TEXT = 65_536  #: characters of a result, and of each text that a filter reads or returns
MAX_ITEMS = 50  #: entries of the list of a loop
MAX_WORK = 250_000  #: characters that filters and conditions read and values print; an expression counts as `READ`
READ = 10
DATE_WORK = 50  #: units for a character of a format
MAX_PRINTED = 10**100  #: numbers that are printed
MAX_EXPONENT = 100  #: of a number that is a text
MAX_DEPTH = 10  #: nested tags
MAX_OPERATORS = 40  #: of a condition, one in another
MISSING = object()  #: the value of a path without an item


class CannotRender(Exception):
    """The data of this touch lacks a value, or has one that the text cannot use."""


class InvalidTemplate(CannotRender, TemplateSyntaxError):
    """The text is not in the template language. The message names the line."""


class Run(BaseContext):
    """The names of one rendering, how it writes values, and the work that is left to it."""

    template: Any  #: read by Django's nodes when they fail
    path = ""  #: the expression that is resolved, for errors

    def __init__(
        self, names: Mapping[str, Any], escape: Callable[[str], str] = str, timezone: str = "", language: str = ""
    ) -> None:
        """Take the names, the escape of the channel's format, and the zone and language of instants and numbers."""
        super().__init__(names)
        self.escape = escape
        self.language = language or settings.LANGUAGE_CODE
        self.left = MAX_WORK
        self._timezone = timezone

    def spend(self, work: int) -> None:
        """Use up `work` units. Raises `CannotRender` if fewer are left."""
        self.left -= work
        if self.left < 0:
            raise CannotRender(_("its loops and filters take too much work with this data"))

    def read_text(self, value: Any) -> str:
        """Return the text of a value, not escaped, and spend its length.

        Raises:
            CannotRender: for missing values, null, lists, objects, NaN and huge numbers, or too long a text.
        """
        if isinstance(value, str):
            text = value
        elif isinstance(value, bool):
            text = "true" if value else "false"
        elif isinstance(value, datetime):
            text = self.read_instant(value).isoformat()  # RFC 3339
        elif isinstance(value, int | float) and abs(value) < MAX_PRINTED:
            text = str(value)
        else:
            self.check_present(value)
            if isinstance(value, list | tuple):
                raise CannotRender(_("“%(name)s” is a list; name one of its entries, or use join", name=self.path))
            if isinstance(value, dict):
                raise CannotRender(_("“%(name)s” is an object; name one of its fields", name=self.path))
            raise CannotRender(_("“%(name)s” cannot be printed", name=self.path))
        self.spend(len(text))
        return check_length(text)

    def read_instant(self, value: Any) -> datetime:
        """Return an instant, or one that a text states as RFC 3339, in the customer's zone."""
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                raise CannotRender(_("“%(name)s” is not an instant", name=self.path)) from None
        if not isinstance(value, datetime):
            raise CannotRender(_("“%(name)s” is not an instant", name=self.path))
        try:
            zone = ZoneInfo(self._timezone or settings.TIME_ZONE)
        except (ZoneInfoNotFoundError, ValueError, OSError):  # a zone that this machine does not know
            zone = ZoneInfo(settings.TIME_ZONE)
        return value.astimezone(zone) if value.tzinfo else value.replace(tzinfo=zone)

    def check_present(self, value: Any) -> None:
        if value is MISSING:
            raise CannotRender(_("“%(name)s” is missing", name=self.path))
        if value is None:
            raise CannotRender(_("“%(name)s” is null", name=self.path))


def check_length(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise CannotRender(_("a text must not come to more than %(most)s characters", most=MAX_TEXT))
    return text


# --- filters ----------------------------------------------------------------------------------------------------------

register = Library()
#: What filters take. Django's print a wrong argument or nothing.
ARGUMENTS: Mapping[str, re.Pattern[str]] = {
    "date": re.compile(r"(?!\w*_FORMAT$).{1,100}"),
    "time": re.compile(r"(?:[aAefgGhHiOPsTuZ]|[^a-zA-Z\\]|\\.){1,100}"),
    "floatformat": re.compile(r"-?\d{1,2}[gu]{0,2}|[gu]{1,2}"),
    "join": re.compile(r".{0,100}"),
    "truncatechars": re.compile(r"[1-9]\d{0,4}"),
    "urlencode": re.compile(r".{0,100}"),
}


@register.filter
def default(value: Any, replacement: Any, *, run: Run) -> Any:
    """Replace a missing value and null. Unlike Django's filter, 0, false and an empty text stay."""
    return replacement if value is MISSING or value is None else value


def _format(value: Any, form: str, formatter: Any, run: Run) -> str:
    run.spend(DATE_WORK * len(form))
    return str(formatter(run.read_instant(value)).format(form))


@register.filter
def date(value: Any, form: Any = None, *, run: Run) -> str:
    with override(run.language):
        return _format(value, form or get_format("DATE_FORMAT"), dateformat.DateFormat, run)


@register.filter
def time(value: Any, form: Any = None, *, run: Run) -> str:
    with override(run.language):
        return _format(value, form or get_format("TIME_FORMAT"), dateformat.TimeFormat, run)


@register.filter
def floatformat(value: Any, form: Any = -1, *, run: Run) -> str:
    try:
        number = Decimal(run.read_text(value).strip())
    except InvalidOperation:
        raise CannotRender(_("“%(name)s” is not a number", name=run.path)) from None
    if isinstance(value, bool) or not number.is_finite() or abs(number.adjusted()) > MAX_EXPONENT:
        raise CannotRender(_("“%(name)s” is not a number", name=run.path))
    with override(run.language):
        return defaultfilters.floatformat(number, form)


@register.filter
def join(value: Any, between: Any, *, run: Run) -> SafeString:
    """Join the entries of a list. They are escaped here, so that markup of the author can stand between them."""
    if not isinstance(value, list | tuple):
        raise CannotRender(_("“%(name)s” is not a list", name=run.path))
    run.spend(READ * len(value))
    return SafeString(check_length(str(between).join(run.escape(run.read_text(each)) for each in value)))


@register.filter
def length(value: Any, *, run: Run) -> int:
    if not isinstance(value, str | list | tuple | dict):
        raise CannotRender(_("“%(name)s” has no length", name=run.path))
    return len(value)


def _read_text_first(function: Callable[..., str]) -> Callable[..., str]:
    """Make a filter of Django's that takes a text one of ours."""

    @wraps(function)
    def apply(value: Any, *arguments: Any, run: Run) -> str:
        with override(run.language):  # Django's catalogues have their own ellipses
            return function(run.read_text(value), *arguments)

    return apply


for _name in ("lower", "title", "truncatechars", "upper", "urlencode"):
    register.filter(_name, _read_text_first(getattr(defaultfilters, _name)))


# --- if and for -------------------------------------------------------------------------------------------------------


def _compare(run: Run, name: str, left: Any, right: Any) -> bool:
    """Compare values whose comparison has a bounded cost. Raises `TypeError` for others."""
    whole = str | list | tuple if name in ("in", "not in") else str | int | float | datetime
    if not isinstance(left, str | int | float | datetime) or not isinstance(right, whole):
        raise TypeError
    run.spend(sum(len(each) for each in (left, right) if isinstance(each, str)))
    run.spend(READ * len(right) if isinstance(right, list | tuple) else 0)
    return bool(_COMPARISONS[name](left, right))


_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "in": lambda value, whole: value in whole, "not in": lambda value, whole: value not in whole,
}  # fmt: skip


def _compile_condition(tree: Any, depth: int = 0) -> Callable[[Run], Any]:
    """Turn Django's tree of operators and expressions into a function.

    Django's own takes each error for false, so that a wrong branch is sent.
    """
    if depth > MAX_OPERATORS:
        raise InvalidTemplate(_("it is nested too deeply"))
    if tree.id == "literal":
        return tree.value.resolve  # type: ignore[no-any-return]
    first, name = _compile_condition(tree.first, depth + 1), getattr(tree.first, "text", "…")
    if tree.id == "not":
        return lambda run: not first(run)
    second = _compile_condition(tree.second, depth + 1)
    if tree.id == "and":
        return lambda run: first(run) and second(run)
    if tree.id == "or":
        return lambda run: first(run) or second(run)
    if tree.id not in _COMPARISONS:
        raise InvalidTemplate(_("“%(name)s” is not part of the template language", name=tree.id))

    def compare(run: Run) -> bool:
        try:
            return _compare(run, tree.id, first(run), second(run))
        except TypeError:
            raise CannotRender(_("“%(name)s” cannot be compared", name=name)) from None

    return compare


@register.tag("if")
def build_if(parser: Any, token: Any) -> IfNode:
    found: Any = do_if(parser, token).conditions_nodelists
    tests: Any = [(test and SimpleNamespace(eval=_compile_condition(test)), body) for test, body in found]
    return IfNode(tests)


@register.tag("for")
def build_for(parser: Any, token: Any) -> Any:
    words = token.split_contents()
    if parser.loop:
        raise InvalidTemplate(_("a loop must not contain another loop"))
    if len(words) != 4 or words[2] != "in" or not words[1].isidentifier():
        raise InvalidTemplate(_("a loop is written like {% for line in event.data.lines %}"))
    parser.loop = words[1]
    node: Any = do_for(parser, token)
    parser.loop = ""
    expression = node.sequence

    def find_items(run: Run, ignore_failures: bool = True) -> Any:
        items = expression.resolve(run)
        if not isinstance(items, list | tuple):
            raise CannotRender(_("“%(name)s” is not a list", name=expression.path))
        if len(items) > MAX_ITEMS:
            raise CannotRender(_("“%(name)s” has more than %(most)s entries", name=expression.path, most=MAX_ITEMS))
        return items

    node.sequence = SimpleNamespace(resolve=find_items)
    return node


# --- engine -----------------------------------------------------------------------------------------------------------


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
                name = function._filter_name
                for is_path, each in arguments:
                    if is_path and each.lookups is not None:
                        raise InvalidTemplate(_("“%(name)s” takes a text in quotes or a number", name=name))
                    if not ARGUMENTS[name].fullmatch(argument := str(each.literal if is_path else each)):
                        raise InvalidTemplate(_("“%(name)s” does not take “%(given)s”", name=name, given=argument[:60]))
        if any(function._filter_name == "join" for function, *_arguments in self.filters[:-1]):
            raise InvalidTemplate(_("“join” must be the last filter: it escapes the entries"))

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
        super().__init__(tokens, builtins=[register])
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


ENGINE = Engine(loaders=[])  #: `TextParser` has the only library


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


# --- rendering --------------------------------------------------------------------------------------------------------


TRADITIONAL = frozenset(("tw", "hk", "mo"))  #: regions that write Chinese in traditional characters
LOCALE = re.compile(r"[A-Za-z]{2,8}(?:[-_][A-Za-z0-9]{1,8})*")  #: BCP 47, also with “_”
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def render_message(
    template: TemplateSpec, customer: CustomerSpec, event: EventSpec, escape: Callable[[str], str] = str
) -> tuple[str, str, str]:
    """Return subject, body and locale for this customer, with instants in the customer's zone.

    `escape` is that of the channel. Values in the subject are put on one line: a header or a title has no markup.

    Raises:
        CannotRender: data is missing or unusable, or the template has no valid text.
    """
    text = choose_text(template, customer.locale)
    names, language = template_variables(customer, event), _find_language(text.locale)
    subject = ""
    if text.subject:
        subject = _compile_text(text.subject).render(Run(names, escape_line, customer.timezone, language))
    body = _compile_text(text.body).render(Run(names, escape, customer.timezone, language))
    return subject, body, text.locale


def escape_line(value: str) -> str:
    """Return a value without line breaks and other control characters."""
    return _CONTROLS.sub(" ", value)


def template_variables(customer: CustomerSpec, event: EventSpec) -> dict[str, Any]:
    """Return the variables of a text (`VARIABLES`)."""
    return {
        "user": {
            "id": customer.user_id,
            "name": customer.name or customer.user_id,
            "level": customer.level,
            "locale": customer.locale,
            "timezone": customer.timezone,
        },
        "event": {
            "id": event.event_id,
            "source": event.source,
            "type": event.type,
            "time": event.occurred_at,
            "data": event.data,
        },
        "chat": {"id": event.chat_id},
        "customer": {"attributes": customer.profile.attributes, "tags": customer.profile.tags},
    }


class Locale(NamedTuple):
    """The parts of a locale, in lower case. Chinese always has a script."""

    language: str
    script: str
    region: str


@lru_cache(maxsize=1024)
def read_locale(tag: str) -> Locale:
    """Return the parts of a BCP 47 tag in any case, also with “_” and an encoding: `zh_TW.UTF-8`."""
    language, *rest = re.split(r"[.@]", tag.strip().lower())[0].replace("_", "-").split("-")
    script = next((part for part in rest if len(part) == 4 and part.isalpha()), "")
    region = next((part for part in rest if re.fullmatch("[a-z]{2}|[0-9]{3}", part)), "")
    if language == "zh" and not script:
        script = "hant" if region in TRADITIONAL else "hans"
    return Locale(language, script, region)


def choose_text(template: TemplateSpec, locale: str) -> TextSpec:
    """Return the text in the customer's language, else in the installation's, else the first one.

    Within a language the same script counts more than the same region, and that more than a text without region.
    """
    if not template.texts:
        raise CannotRender(_("template %(key)s has no text", key=template.key))
    if len(template.texts) == 1:
        return template.texts[0]
    for wanted in (read_locale(locale), read_locale(settings.LANGUAGE_CODE)):
        found = [(read_locale(text.locale), text) for text in template.texts]
        near = [
            (has.script == wanted.script, has.region == wanted.region, not has.region, text)
            for has, text in found
            if has.language == wanted.language
        ]
        if near:
            return max(near, key=lambda each: each[:3])[3]
    return template.texts[0]


@lru_cache(maxsize=1024)
def _find_language(locale: str) -> str:
    """Return the name of a locale's language in Django's catalogues; "" for a text without a valid one."""
    if not LOCALE.fullmatch(locale):
        return ""
    found = read_locale(locale)
    return f"zh-{found.script}" if found.language == "zh" else "-".join(filter(None, (found.language, found.region)))


def reads_profile(template: TemplateSpec) -> bool:
    """Return whether a text of the template names attributes or tags."""
    for source in [source for text in template.texts for source in (text.subject, text.body)]:
        try:
            if "customer" in _compile_text(source).roots:
                return True
        except InvalidTemplate:
            continue  # it fails its touches
    return False


@lru_cache(maxsize=1024)
def _compile_text(source: str) -> Text:
    """Compile a text once: a batch renders the same text repeatedly."""
    return Text(source)
