"""What is said: nothing half-empty, nothing that a text could reach into, and no typo that only shows at night."""

from __future__ import annotations

from typing import Any

import pytest

from scheduling.errors import InvalidInput
from scheduling.rendering import CannotRender, check_text, render
from scheduling.sandbox import Sandbox, is_plain
from scheduling.specs import TextSpec
from tests.scheduling.core.cast import ann, event, template


def said(body: str, customer: Any = None, **data: Any) -> str:
    return render(template(body=body), customer or ann(), event(data=data))[1]


def test_a_text_speaks_of_the_customer_the_event_and_the_chat() -> None:
    body = (
        "{{ user.name }} {{ user.id }} {{ event.type }} {{ event.data.order.no }} {{ event.data['sku'] }} {{ chat.id }}"
    )
    assert said(body, order={"no": 7}, sku="茶") == "Ann ann material.downloaded 7 茶 c1"


def test_who_has_no_name_is_called_by_their_id() -> None:
    assert said("{{ user.name }}", ann(name="")) == "ann"


def test_the_subject_is_a_text_as_well() -> None:
    spec = template(texts=(TextSpec("en", "For {{ user.name }}", "hi"),))
    assert render(spec, ann(), event()) == ("For Ann", "hi", "en")


@pytest.mark.parametrize(
    "body", ["{{ event.data.order }}", "{{ event.data.a.b }}", "{{ event.data['x'] }}", "{{ nobody }}"]
)
def test_missing_data_fails_instead_of_leaving_a_gap(body: str) -> None:
    with pytest.raises(CannotRender):
        said(body, a={})


def test_a_default_is_the_way_to_live_without_it() -> None:
    assert said("{{ event.data.coupon | default('none') }}") == "none"


@pytest.mark.parametrize("body", ["{{ 1 // 0 }}", "{{ event.data.a + 1 }}", "{{ event.data.a | int + event.data.b }}"])
def test_a_text_that_cannot_be_worked_out_fails_too(body: str) -> None:
    with pytest.raises(CannotRender):
        said(body, a="text", b=[])


@pytest.mark.parametrize(
    "body",
    [
        "{{ user.__class__ }}",
        "{{ user['__class__'] }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ event.data.items.__func__ }}",
        "{{ event.data|attr('__class__') }}",
        "{{ event.data.update(x=1) }}",
        "{{ event.data.list.append(1) }}",
        "{{ '{0.__class__}'.format(user) }}",
        "{{ range(10) | list }}",
        "{{ cycler('a') }}",
        "{{ lipsum() }}",
    ],
)
def test_a_text_cannot_reach_out_of_its_sandbox(body: str) -> None:
    data = {"list": [1]}
    with pytest.raises(CannotRender):
        said(body, **data)
    assert data == {"list": [1]}


@pytest.mark.parametrize(
    "body",
    [
        "{{ 9 ** (9 ** 9) }}",
        "{{ event.data.n ** event.data.n }}",
        "{{ 'ha' * 1000000000 }}",
        "{{ event.data.n * 'ha' }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d'|format(1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, event.data.n) }}",
        "{{ 'ha'.center(1000000000) }}",
    ],
)
def test_a_text_cannot_compute_for_ever(body: str) -> None:
    """Neither in the page that saves it nor in a worker, where no time limit would end it."""
    check_text(body, field="body")
    with pytest.raises(CannotRender):
        said(body, n=1_000_000_000)


GROWING = {
    "replace": "{{ 'aaaaaaaaaa'" + "|replace('a', 'aaaaaaaaaa')" * 11 + " }}",
    "the method replace": "{{ 'aaaaaaaaaa'" + ".replace('a', 'aaaaaaaaaa')" * 11 + " }}",
    "join": "{% set a = 'x' * 5000 %}{% set a = a|join(a) %}{% set a = a|join(a) %}{{ a }}",
    "the method join": "{% set a = 'x' * 5000 %}{% set a = a.join(a) %}{% set a = a.join(a) %}{{ a }}",
    "loops": "{% for a in X %}{% for b in X %}{% for c in X %}{% endfor %}{% endfor %}{% endfor %}",
    "loops that choose": "{% for a in X %}{% for b in X if false %}{% endfor %}{% endfor %}",
    "a loop in itself": "{% for a in 'ab' recursive %}{% if loop.depth < 60 %}{{ loop('ab') }}{% endif %}{% endfor %}",
    "a macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "output": "{% for a in X %}{{ X }}{% endfor %}",
    "~": "{% set a = 'x' %}" + "{% set a = a ~ a %}" * 60,
    "+": "{% set a = 'x' %}" + "{% set a = a + a %}" * 60,
    "a block": "{% set a = 'x' %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 60,
    "lists in lists": "{% set a = ['x'] %}" + "{% set a = [a, a] %}" * 60 + "{{ a }}",
    "lists": "{% set a = ['x' * 9000] * 9000 %}{{ a|join }}",
    "map": "{% set a = (X|map('replace', 'x', X)|list)|string %}",
    "format": "{{ ('{0}' * 3000).format(('{0}' * 3000).format('x' * 9000)) }}",
    "the filter format": "{% set a = 'x' %}" + "{% set a = '%s%s'|format(a, a) %}" * 60,
    "%": "{% set a = 'x' %}" + "{% set a = ('%s' ~ a) % a %}" * 60,
    "numbers": "{% set a = 99999999999999999999 %}" + "{% set a = a * a %}" * 40,
    "wordwrap": "{{ X|wordwrap(1, true, X) }}",
}


@pytest.mark.parametrize("how", GROWING)
def test_a_text_that_grows_without_end_is_refused_when_it_is_saved_and_when_it_is_said(how: str) -> None:
    """A worker would render it until its memory ends, with its customers locked."""
    body = GROWING[how].replace("X", "('x' * 10000)")
    with pytest.raises(InvalidInput, match="too much work") as refused:
        check_text(body, field="texts.en.body")
    assert refused.value.errors[0].field == "texts.en.body"
    with pytest.raises(CannotRender):
        said(body)


@pytest.mark.parametrize(
    "body",
    [
        "{{ 5|round(-1000000000) }}",
        "{{ [1]|tojson(1000000000) }}",
        "{{ [[1], [2]]|sum(start=[]) }}",
        "{{ (5).to_bytes(1000000000, 'big') }}",
        "{{ 'a'.translate({97: 'b'}) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ event.data.long|replace('x', event.data.long) }}",
        "{% for a in event.data.long %}{% for b in event.data.long %}.{% endfor %}{% endfor %}",
        "{% macro m(f, n) %}{{ [f] * n }}{% endmacro %}{{ m(event.data.long, event.data.n) }}",
        *(
            "{% for a in event.data.lines %}{% if " + looked + " %}{% endif %}{% endfor %}"
            for looked in (
                "event.data.lines|map(attribute='n')|max",
                "event.data.lines|selectattr('n', 'eq', 1)|first is defined",
                "event.data.lines|sum(attribute='n')",
                "0 in event.data.lines",
                "event.data.lines == event.data.lines|list",
                "event.data.lines.count(0)",
                "event.data.lines|tojson",
                "(event.data.lines ~ '')|length",
            )
        ),
        "{{ 'x'|xmlattr }}",
    ],
)
def test_what_only_the_data_makes_grow_is_refused_when_it_is_said(body: str) -> None:
    with pytest.raises(CannotRender):
        said(body, long="x" * 10_000, n=1_000_000, lines=[{"n": 0}] * 20_000)


def test_an_order_of_hundreds_of_lines_can_be_said() -> None:
    body = (
        "{% for each in event.data.lines if each.n %}{{ loop.index }}/{{ loop.length }}"
        " {{ each.sku|replace('-', ' ') }}"
        " {% for tag in each.tags %}{{ tag }}{{ '' if loop.last else '+' }}{% endfor %}"
        " {{ '%.2f'|format(each.n * 2) }};"
        "{% else %}none{% endfor %}"
        "{{ event.data.lines|map(attribute='sku')|join(', ') }} {{ ['a', 'b'].index('b') }} {{ ', '.join(['x', 'y']) }}"
    )
    lines = [{"sku": f"tea-{number}", "n": number + 1, "tags": ["new", "hot"]} for number in range(400)]
    check_text(body, field="body")
    told = said(body, lines=lines)
    assert told.startswith("1/400 tea 0 new+hot 2.00;2/400 tea 1 new+hot 4.00;")
    assert told.endswith("tea-398, tea-399 1 x, y")
    assert said(body, lines=[]).startswith("none")


@pytest.mark.parametrize(
    ("body", "plain"),
    [
        ("hi {{ user.name }}", True),
        ("{% if user.level == 'vip' %}{{ event.data.n * 3 }}{% endif %}{{ '%.2f'|format(event.data.n) }}", True),
        ("{{ event.time.strftime('%H:%M') }} {{ event.data.x|default('')|upper }} {{ user.name ~ '!' }}", True),
        ("{{ '%r'|format('%r'|format(user.name)) }}", False),
        ("{% for each in event.data.lines %}{% endfor %}", False),
        ("{{ user.name|replace('a', 'b') }}", False),
        ("{{ [[user.name]|string]|string }}", False),
    ],
)
def test_only_what_can_grow_is_paid_for(body: str, plain: bool) -> None:
    """The usual text costs nothing more."""
    assert is_plain(Sandbox().parse(body)) == plain


def test_what_is_nested_too_deeply_is_refused_when_it_is_saved() -> None:
    with pytest.raises(InvalidInput):
        check_text("{{ " + "(" * 100_000 + ")" * 100_000 + " }}", field="body")


def test_small_sums_and_prices_can_be_said() -> None:
    assert (
        said("{{ '%.2f'|format(event.data.n * 3) }} {{ 7 % 4 }} {{ '-' * 3 }} {{ '{}!'.format(5) }}", n=2)
        == "6.00 3 --- 5!"
    )


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("{{ usr.name }}", "usr"),
        ("{{ user.nmae }}", "user.nmae"),
        ("{{ user['nmae'] }}", "user.nmae"),
        ("{{ event.payload }}", "event.payload"),
        ("{% if order %}x{% endif %}", "order"),
        ("{% for each in things %}{{ each }}{% endfor %}", "things"),
        ("{{ user.name | shout }}", "shout"),
        ("{{ user.name is loud }}", "loud"),
        ("{{ user.name ", "line 1"),
        ("{% include 'x' %}{{ usr }}", "usr"),
    ],
)
def test_what_no_touch_will_ever_have_is_refused_when_it_is_saved(body: str, named: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_text(body, field="texts.zh-hans.body")
    (error,) = refused.value.errors
    assert error.field == "texts.zh-hans.body"
    assert named in error.message


@pytest.mark.parametrize(
    "body",
    [
        "您好 {{ user.name }}，{{ event.data.order.no }}",
        "{% for each in event.data.lines %}{{ each.sku }} {{ loop.index }}{% endfor %}",
        "{% set total = event.data.total %}{{ total }}",
        "{{ event.time.strftime('%H:%M') }} {{ event.data.x | default('') | upper }}",
    ],
)
def test_what_can_be_said_is_accepted(body: str) -> None:
    check_text(body, field="body")


@pytest.mark.parametrize(
    ("locale", "heard"),
    [
        ("en", "en"),
        ("EN", "en"),
        ("zh-Hans", "zh-hans"),
        ("zh-hant", "zh-hans"),
        ("zh", "zh-hans"),
        ("fr", "de"),
        ("", "de"),
    ],
)
def test_the_customer_hears_their_language_else_its_other_region_else_the_first(locale: str, heard: str) -> None:
    texts = tuple(TextSpec(each, "", each) for each in ("de", "en", "zh-hans"))
    assert render(template(texts=texts), ann(locale=locale), event()) == ("", heard, heard)


def test_a_template_without_any_text_says_nothing() -> None:
    with pytest.raises(CannotRender, match="no text"):
        render(template(texts=()), ann(), event())
