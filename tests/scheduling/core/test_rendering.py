"""Rendering: no incomplete text, no access to internals, and typos found before sending."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.errors import InvalidInput
from scheduling.policy.profile import Profile
from scheduling.policy.specs import TextSpec
from scheduling.templating.rendering import check_text, render_message
from scheduling.templating.values import CannotRender
from tests.scheduling.core.sample_data import NOON, ann, event, template


def render_body(body: str, customer: Any = None, **data: Any) -> str:
    return render_message(template(body=body), customer or ann(), event(data=data))[1]


def test_render_prints_customer_event_and_chat() -> None:
    body = (
        "{{ user.name }} {{ user.id }} {{ event.type }} {{ event.data.order.no }} {{ event.data['sku'] }} {{ chat.id }}"
    )
    assert render_body(body, order={"no": 7}, sku="茶") == "Ann ann material.downloaded 7 茶 c1"


def test_render_customer_without_name_prints_id() -> None:
    assert render_body("{{ user.name }}", ann(name="")) == "ann"


def test_render_subject_is_a_template() -> None:
    spec = template(texts=(TextSpec("en", "For {{ user.name }}", "hi"),))
    assert render_message(spec, ann(), event()) == ("For Ann", "hi", "en")


@pytest.mark.parametrize(
    "body", ["{{ event.data.order }}", "{{ event.data.a.b }}", "{{ event.data['x'] }}", "{{ nobody }}"]
)
def test_render_missing_data_fails(body: str) -> None:
    with pytest.raises(CannotRender):
        render_body(body, a={})


def test_render_default_replaces_missing_data() -> None:
    assert render_body("{{ event.data.coupon | default('none') }}") == "none"


@pytest.mark.parametrize(
    "name", ["items", "values", "keys", "copy", "get", "pop", "tags.count", "tags.index", "name.title", "name.upper"]
)
def test_render_missing_path_named_like_method_fails(name: str) -> None:
    with pytest.raises(CannotRender, match=rf"“event\.data\.{name}” is missing"):
        render_body(f"{{{{ event.data.{name} }}}}", tags=["a"], name="tea")


@pytest.mark.parametrize("path", ["event.data.items", "event.data['items']", "event.data.o.items", "event.data.o.get"])
def test_render_path_named_like_method_prints_item(path: str) -> None:
    assert render_body("{{ " + path + " }}", items="2 teas", o={"items": "2 teas", "get": "2 teas"}) == "2 teas"


def test_render_null_is_treated_like_missing() -> None:
    for body in ("{{ event.data.x }}", "{{ event.data.x|upper }}", "{{ event.data.list[-1] }}", "{{ event.data.x.y }}",
                 "{{ event.data.list|join }}", "{{ event.data.list[0] }}"):  # fmt: skip
        with pytest.raises(CannotRender, match=r"is null|is missing"):
            render_body(body, x=None, list=[None])
    assert render_body("{{ event.data.x|default('-') }}{{ event.data.x.y|default('-') }}", x=None) == "--"
    assert render_body("{{ 'a' if event.data.x else 'b' }}{{ event.data.x is none }}", x=None) == "btrue"


def test_render_values_without_text_are_refused() -> None:
    for body in ("{{ event.data }}", "{{ event.data.list }}", "{{ event.data.o|upper }}", "{{ event.data.os|join }}",
                 "{{ '%d'|format(event.data.o) }}", "{{ event.data.list|trim }}", "{{ user }}"):  # fmt: skip
        with pytest.raises(CannotRender):
            render_body(body, list=[1], o={"a": 1}, os=[{"a": 1}])
    assert render_body("{{ event.data.yes }} {{ 1 == 2 }}", yes=True) == "true false"


@pytest.mark.parametrize(
    "body",
    [
        "{{ 1 / 0 }}",
        "{{ event.data.a + 1 }}",
        "{{ event.data.a + event.data.a }}",
        "{{ event.data.a | int + event.data.b }}",
    ],
)
def test_render_failing_expression_fails(body: str) -> None:
    with pytest.raises(CannotRender):
        render_body(body, a="text", b=[])


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
def test_render_cannot_leave_the_sandbox(body: str) -> None:
    data = {"list": [1]}
    with pytest.raises(CannotRender):
        render_body(body, **data)
    assert data == {"list": [1]}


def test_render_long_order_with_loops_and_filters() -> None:
    body = (
        "{% for each in event.data.lines if each.n != 2 %}{{ loop.index }}/{{ event.data.lines|length }}"
        " {{ each.sku|replace('-', ' ') }}"
        " {{ each.tags|join('+') }}{{ '.' if loop.last else '' }}"
        " {{ '%.2f'|format(each.n * 2) }};{% endfor %}"
        "{{ event.data.lines|join(', ', attribute='sku') }}"
    )
    lines = [{"sku": f"tea-{number}", "n": number + 1, "tags": ["new", "hot"]} for number in range(400)]
    check_text(body, field="body")
    told = render_body(body, lines=lines)
    assert told.startswith("1/400 tea 0 new+hot 2.00;2/400 tea 2 new+hot 6.00;")
    assert "399/400 tea 399 new+hot. 800.00;tea-0, " in told
    assert told.endswith("tea-398, tea-399")


def test_render_loop_restores_shadowed_variable() -> None:
    assert (
        render_body("{% for user in event.data.l %}{{ user }}{{ loop.first }}{% endfor %}{{ user.id }}", l=[1])
        == "1trueann"
    )


_PATHS = ["user", "user.name", "event.time", "event.data", "event.data.a", "event.data.a.b", "event.data.a[0]",
          "event.data.a[-1].b", "event.data['items']", "event.data.b", "chat.id"]  # fmt: skip
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from([10**120, "x" * 40_000]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b", "items"]), inner),
    max_leaves=6,
)  # fmt: skip


@given(
    st.lists(
        st.sampled_from(_PATHS).map("{{{{ {} }}}}".format) | st.sampled_from(["您好 ", "\n", "%s {0}"]), max_size=6
    ),
    st.dictionaries(st.sampled_from(["a", "b", "items"]), _VALUES),
)
def test_render_plain_text_equals_full_engine(parts: list[str], data: dict[str, Any]) -> None:
    """A statement that prints nothing makes the same text one that is not plain."""

    def outcome(body: str) -> str:
        try:
            return render_body(body, **data)
        except CannotRender as error:
            return f"refused: {error}"

    plain = "".join(parts)
    assert outcome(plain) == outcome("{% if 1 == 2 %}{% endif %}" + plain)


def test_check_text_nested_too_deeply_is_refused() -> None:
    with pytest.raises(InvalidInput):
        check_text("{{ " + "(" * 100_000 + ")" * 100_000 + " }}", field="body")


def test_render_calculations_print_numbers() -> None:
    body = "{{ '%.2f'|format(event.data.n * 3) }} {{ 7 % 4 - 1 }} {{ '%03d%%'|format(-event.data.n) }}"
    assert render_body(body, n=2) == "6.00 2 -02%"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("event.data.n|int + 1", "8"),
        ("event.data.price|int", "12"),
        ("event.data.price|float|round(1)", "12.8"),
        ("'abc'|length", "3"),
        ("'a b'|truncate(1, end='')", "a b"),
        ("'tea and more tea'|truncate(7)", "tea..."),
        ("' it’s tea '|trim|title", "It’s Tea"),
        ("event.data.empty|default('-', boolean=true)", "-"),
        ("'a' in ['a', user.id]", "true"),
        ("user.id not in ('a', 'b')", "true"),
        ("'nn' in user.id", "true"),
        ("1 in event.data.list", "true"),
        ("'b' if event.data.x is undefined else 'a'", "b"),
        ("event.data.empty or 'none'", "none"),
        ("event.data.list[-1]", "2"),
        ("event.data['list'].0", "1"),
    ],
)
def test_render_expression_prints_its_value(expression: str, text: str) -> None:
    body = "{{ " + expression + " }}"
    check_text(body, field="body")
    assert render_body(body, n="7", price="12.75", empty="", list=[1, 2]) == text


@pytest.mark.parametrize("name", ["int", "float"])
@pytest.mark.parametrize("value", ["abc", "", True, [], "1e999", "nan"])
def test_render_int_of_text_without_number_fails(name: str, value: Any) -> None:
    with pytest.raises(CannotRender):
        render_body("{{ event.data.x|" + name + " }}", x=value)


REFUSED = [
    "{% set x = 1 %}", "{{ event.data.no[:4] }}", "{{ event.data[user.level] }}", "{{ 'a' ~ 'b' }}", "{{ ['a'] }}",
    "{{ ['a']|join }}", "{{ 'a' + user.id }}", "{{ '%s' % user.id }}", "{{ 5 // 2 }}", "{{ 2 ** 2 }}", "{{ +1 }}",
    "{{ 1 < 2 < 3 }}", "{{ 1 == [1] }}", "{{ 'a' if user.id }}", "{{ {'a': 1} }}", "{{ (1, 2) }}",
    "{{ user.id is string }}", "{{ 4 is even }}", "{{ event.data.n is divisibleby(3) }}",
    "{{ '%s'|format(user.id) }}", "{{ '%d %d'|format(1, 2) }}", "{{ '%*d'|format(1) }}", "{{ user.id|format(1) }}",
    "{{ event.time.strftime(user.id) }}", "{{ event.time.isoformat() }}", "{{ (user.id|upper).x }}",
    "{% for a in event.data.l %}{% else %}-{% endfor %}", "{% for a, b in event.data.l %}{% endfor %}",
    "{% for a in event.data.l recursive %}{% endfor %}", "{% for a in event.data.l %}{{ loop.length }}{% endfor %}",
    "{% filter upper %}a{% endfilter %}", "{{ user.id|default(*event.data.l) }}", "{{ user.id|trim('a') }}",
    *("{{ event.data.x|" + name + " }}" for name in
      ("map(attribute='a')", "sum", "items", "tojson", "abs", "e", "escape", "string", "count", "d", "first", "last",
       "list", "sort", "attr('a')", "safe", "random", "pprint")),
]  # fmt: skip


@pytest.mark.parametrize("body", REFUSED)
def test_check_text_unsupported_construct_names_line(body: str) -> None:
    with pytest.raises(InvalidInput, match=r"^body: line 2: "):
        check_text(f"{{{{ user.id }}}}\n{body}", field="body")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("{{ usr.name }}", "usr"),
        ("{{ user.nmae }}", "user.nmae"),
        ("\n{{ user['nmae'] }}", "line 2: unknown variable “user.nmae”"),
        ("{{ event.payload }}", "event.payload"),
        ("{% if order %}x{% endif %}", "order"),
        ("{% for each in things %}{{ each }}{% endfor %}", "things"),
        ("{{ user.name | shout }}", "shout"),
        ("{{ user.name is loud }}", "loud"),
        ("{{ user.name ", "line 1"),
        ("\n{{ event.data.x.strip() }}", "line 2"),
        ("{% macro m() %}{% endmacro %}", "macro"),
        ("{{ range(3) }}", "call"),
        ("{% for a in event.data.x %}{% for b in a %}{% endfor %}{% endfor %}", "another loop"),
        ("{{ user.name|join(1, 2, 3) }}", "join"),
        ("{{ 'x' ** 2 }}", "pow"),
        ("{{ " + "9" * 5_000 + " }}", "must not be longer than 20"),
        ("{{ 0x" + "f" * 30_000 + " }}", "must not be longer than 20"),
        ("{% if 1 %}" * 200 + "{% endif %}" * 200, "nested too deeply"),
        ("{{ " + "not " * 1_500 + "1 }}", "nested too deeply"),
        ("x" * 32_769, "must not be longer than 32768"),
        ("{{ user.id }}" * 1_000, "4000 tokens"),
        ("{% include 'x' %}{{ usr }}", "include"),
    ],
)
def test_check_text_unknown_name_is_refused(body: str, named: str) -> None:
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
        "{{ event.time.strftime('%H:%M') }} {{ event.data.x | default('') | upper }}",
        "{% for price in event.data.prices if price > 3 %}{{ price }}{% if not loop.last %}, {% endif %}{% endfor %}",
        "{{ event.data.lines[0].sku }} {{ event.data['unit price']|default('x') }}",
        "{% if user.level in ['vip', 'svip'] and event.data.n is defined %}{{ event.data.n|round(1) }}{% endif %}",
        "{# a note #}{% raw %}{{ x }}{% endraw %}{{ event.data.url|urlencode }}{{ event.data.t|truncate(20) }}",
    ],
)
def test_check_text_supported_text_is_accepted(body: str) -> None:
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
def test_render_picks_language_region_or_first(locale: str, heard: str) -> None:
    texts = tuple(TextSpec(each, "", each) for each in ("de", "en", "zh-hans"))
    assert render_message(template(texts=texts), ann(locale=locale), event()) == ("", heard, heard)


def test_render_template_without_text_fails() -> None:
    with pytest.raises(CannotRender, match="no text"):
        render_message(template(texts=()), ann(), event())


def test_render_prints_attributes_and_tags() -> None:
    who = ann(profile=Profile({"city": "上海", "orders": 3, "since": NOON}, ("new", "vip")))
    body = (
        "{{ customer.attributes.city }} {{ customer.attributes.orders }}"
        " {{ customer.attributes.since.strftime('%m-%d') }} {{ customer.tags|join(',') }}"
        " {{ customer.attributes.size|default('M') }}{% if 'vip' in customer.tags %}!{% endif %}"
    )
    assert render_body(body, who) == "上海 3 03-03 new,vip M!"


def test_render_missing_attribute_fails() -> None:
    with pytest.raises(CannotRender, match=r"“customer\.attributes\.city” is missing"):
        render_body("{{ customer.attributes.city }}")
