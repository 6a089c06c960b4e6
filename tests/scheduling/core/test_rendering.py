"""Rendering: no incomplete text, no access to internals, values that add no markup, and typos found before sending."""

import pytest

from scheduling.policy.profile import Profile
from scheduling.policy.specs import TextSpec
from scheduling.templating import CannotRender, InvalidTemplate, Text, render_message
from tests.scheduling.core.sample_data import NOON, ann, event, template
from tests.support.tables import each_row


def render_body(body, customer=None, **data):
    return render_message(template(body=body), customer or ann(), event(data=data))[1]


def shout(value):
    return value.replace("<", "&lt;")


#: body, text for the data below
RENDERED = [
    ("{{ user.name }} {{ user.id }} {{ event.type }} {{ chat.id }}", "Ann ann material.downloaded c1"),
    ("{{ event.data.order.no }} {{ event.data.lines.0.sku }} {{event.data.list.1}}", "7 tea 2"),
    ("{{ event.data.items }} {{ event.data.order.get }}", "2 teas got"),  # items, never methods
    ("{{ event.data.yes }} {{ event.data.price }} {{ 5 }} {{ 'a' }}", "true 1234.5 5 a"),
    ("{# a note #}100 % } {x {{ '{{' }}\r\nb\n", "100 % } {x {{\nb"),
    ("{{ event.data.coupon|default:'none' }} {{ event.data.null | default:user.id }}", "none ann"),
    ("{{ event.data.zero|default:1 }}{{ event.data.no|default:1 }}{{ event.data.empty|default:1 }}", "0false"),
    ("{{ event.data.null.x.y|default:'-' }}{{ event.data.list.9|default:'-' }}", "--"),
    ("{{ event.data.text|upper }} {{ event.data.text|title }} {{ 'AB'|lower }}", "GREEN TEA Green Tea ab"),
    ("{{ event.data.text|truncatechars:6 }} {{ event.data.text|urlencode }}", "gre... green%20tea"),
    ("{{ event.data.list|join:'、' }} {{ event.data.list|length }}{{ event.data.text|length }}", "1、2 29"),
    ("{{ event.data.price|floatformat:2 }} {{ event.data.digits|floatformat }}", "1234.50 7.3"),
    ("{% if event.data.zero %}a{% elif event.data.price > 1000 %}b{% else %}c{% endif %}", "b"),
    ("{% if user.id == 'ann' and not event.data.zero or 1 > 2 %}yes{% endif %}", "yes"),
    ("{% if 'tea' in event.data.text and 2 in event.data.list and 'x' not in event.data.text %}in{% endif %}", "in"),
    ("{% if event.data.zero and event.data.nothing %}{% else %}lazy{% endif %}", "lazy"),
    ("{% if event.data.missing|default:'' %}a{% else %}b{% endif %}", "b"),
    ("{% for line in event.data.lines %}{{ forloop.counter }}.{{ line.sku }}{% if not forloop.last %}, {% endif %}"
     "{% endfor %}", "1.tea, 2.pot"),
    ("{% for user in event.data.list %}{{ user }}{% endfor %}{{ user.id }}", "12ann"),
    ("{% for x in event.data.none %}{{ x }}{% empty %}none{% endfor %}", "none"),
    ("{{ event.time|date:'Y-m-d H:i' }} {{ event.time|time:'H:i' }}", "2026-03-03 20:00 20:00"),
    ("{{ event.data.at|date:'H:i' }} {{ event.data.day|date:'j.n.' }}", "20:00 3.3."),
    ("{{ event.time }}", "2026-03-03T20:00:00+08:00"),
    ("{{ customer.attributes.city }} {{ customer.attributes.orders }} {{ customer.attributes.since|date:'m-d' }}",
     "上海 3 03-03"),
    ("{{ customer.tags|join:',' }}{% if 'vip' in customer.tags %}!{% endif %}", "new,vip!"),
    ("{{ customer.attributes.size|default:'M' }}", "M"),
]  # fmt: skip
DATA = {
    "order": {"no": 7, "get": "got"}, "lines": [{"sku": "tea"}, {"sku": "pot"}], "list": [1, 2], "items": "2 teas",
    "yes": True, "no": False, "price": 1234.5, "null": None, "zero": 0, "empty": "", "text": "green tea",
    "digits": "7.25", "none": [], "at": "2026-03-03T12:00:00Z", "day": "2026-03-03", "day_text": "soon",
    "nan": float("nan"), "huge": 10**120, "many": list(range(51)), "nulls": [None],
}  # fmt: skip


def test_render_prints_each_construct():
    for body, _ in RENDERED:
        Text(body)
    customer = ann(profile=Profile({"city": "上海", "orders": 3, "since": NOON}, ("new", "vip")))
    assert [(body, render_body(body, customer, **DATA)) for body, _ in RENDERED] == RENDERED


#: body, the reason why no text is made of the data above
FAILING = [
    ("{{ event.data.nothing }}", "“event.data.nothing” is missing"),
    ("{{ event.data.order.copy }}", "“event.data.order.copy” is missing"),
    ("{{ event.data.list.count }}", "“event.data.list.count” is missing"),
    ("{{ event.data.null }}", "“event.data.null” is null"),
    ("{{ event.data.nothing|default:event.data.null }}", "“event.data.nothing” is null"),
    ("{% if event.data.nothing %}{% endif %}", "“event.data.nothing” is missing"),
    ("{% if not event.data.null %}{% endif %}", "“event.data.null” is null"),
    ("{% for x in event.data.nothing %}{% endfor %}", "“event.data.nothing” is missing"),
    ("{% for x in event.data.text %}{% endfor %}", "“event.data.text” is not a list"),
    ("{% for x in event.data.many %}{% endfor %}", "“event.data.many” has more than 50 entries"),
    ("{% for x in event.data.lines %}{{ x.count }}{% endfor %}", "“x.count” is missing"),
    ("{{ event.data }}", "“event.data” is an object; name one of its fields"),
    ("{{ event.data.list }}", "“event.data.list” is a list; name one of its entries, or use join"),
    ("{{ event.data.nulls|join:',' }}", "“event.data.nulls” is null"),
    ("{{ event.data.text|join:',' }}", "“event.data.text” is not a list"),
    ("{{ event.data.price|length }}", "“event.data.price” has no length"),
    ("{{ event.data.text|floatformat:2 }}", "“event.data.text” is not a number"),
    ("{{ event.data.nan }}", "“event.data.nan” cannot be printed"),
    ("{{ event.data.huge }}", "“event.data.huge” cannot be printed"),
    ("{{ event.data.day_text|date:'H' }}", "“event.data.day_text” is not an instant"),
    ("{% if event.data.text > 3 %}{% endif %}", "“event.data.text” cannot be compared"),
    ("{% if 1 in event.data.text %}{% endif %}", "“1” cannot be compared"),
]  # fmt: skip


def test_render_data_without_text_fails_with_the_path():
    outcomes = []
    for body, _ in FAILING:
        with pytest.raises(CannotRender) as failed:
            render_body(body, **DATA)
        outcomes.append((body, str(failed.value)))
    assert outcomes == FAILING


#: body, a part of the error
REFUSED = [
    ("\n{{ usr.name }}", "line 2: unknown variable “usr”; available: chat, customer, event, user"),
    ("{{ user.nmae }}", "line 1: unknown variable “user.nmae”; user has id, level, locale, name, timezone"),
    ("{% for each in event.data.x %}{% endfor %}{{ each }}", "unknown variable “each”"),
    ("{% for each in event.data.x %}{{ forloop.parentloop }}{% endfor %}", "unknown variable “forloop.parentloop”"),
    ("{{ True }}", "unknown variable “True”"),
    ("{{ user.name|shout }}", "unknown filter “shout”; available: date, default, floatformat, join, "),
    *((f"{{{{ event.data.x|{name} }}}}", f"unknown filter “{name}”") for name in
      ("safe", "escape", "add", "slice", "pprint", "stringformat", "yesno", "random", "filesizeformat", "json_script")),
    *((f"{{% {name} %}}", f"“{name.split()[0]}” is not part of the template language") for name in
      ("include 'a'", "extends 'a'", "load i18n", "debug", "now 'Y'", "url 'x'", "with a=1", "block x", "verbatim",
       "csrf_token", "lorem", "cycle 1 2", "regroup a by b as c", "static 'x'", "set x = 1", "endif", "-if 1")),
    ("{{ user.name ", "line 1: “{{” is not closed on its line"),
    ("{% if user.id", "“{%” is not closed"),
    ("a\n{% if user.id %}", "line 2: “if” has no end"),
    ("{{ }}", "line 1: “” cannot be read; write filters like"),
    ("{{ event.data.x|default('') }}", "“event.data.x|default('')” cannot be read"),
    ("{{ event.data['x'] }}", "cannot be read"), ("{{ user.__class__ }}", "cannot be read"),
    ("{{ user._x }}", "cannot be read"), ("{{ _('Yes') }}", "cannot be read"), ("{{ 1 + 1 }}", "cannot be read"),
    ("{{ user.id|default:_('Yes') }}", "cannot be read"), ("{{ user.id|upper:1 }}", "cannot be read"),
    ("{{ customer.tags|join:','|upper }}", "must be the last filter"),
    ("{{ user.id|join }}", "cannot be read"), ("{% if user.id > %}{% endif %}", "cannot be read"),
    ("{% if user.id is chat.id %}{% endif %}", "“is” is not part of the template language"),
    ("{{ user.name|truncatechars:user.id }}", "“truncatechars” takes a text in quotes or a number"),
    ("{{ user.name|floatformat:99999 }}", "“floatformat” does not take “99999”"),
    ("{{ event.time|time:'Y-m' }}", "“time” does not take “Y-m”"),
    ("{{ event.time|date:'" + "r" * 101 + "' }}", "“date” does not take “rrr"),
    ("{% for a in event.data.x %}{% for b in a %}{% endfor %}{% endfor %}", "a loop must not contain another loop"),
    ("{% for a, b in event.data.x %}{% endfor %}", "a loop is written like"),
    ("{% for a in event.data.x reversed %}{% endfor %}", "a loop is written like"),
    ("{% if 1 %}" * 200 + "{% endif %}" * 200, "nested too deeply"),
    ("{% if " + "not " * 100 + "1 %}{% endif %}", "nested too deeply"),
    ("x" * 32_769, "must not be longer than 32768 characters"),
    ("{{ user.id }}" * 501, "a text must not have more than 500 tags"),
    ("\n{{ user.id" + "|upper" * 100 + " }}", "line 2: a tag must not be longer than 500 characters"),
]  # fmt: skip


def test_text_refuses_what_is_not_in_the_language():
    wrong = []
    for body, named in REFUSED:
        with pytest.raises(InvalidTemplate) as refused:
            Text(body)
        if named not in str(refused.value):
            wrong.append((body[:80], named, str(refused.value)))
    assert wrong == []


def test_render_date_reads_no_setting_and_no_module(settings):
    """Django's filter takes the names of formats, which are settings and attributes of modules."""
    settings.SECRET_KEY = "unguessable"
    for name in ("SECRET_KEY", "__file__", "__name__"):
        said = render_body(f"{{{{ event.time|date:'{name}' }}}}")
        assert "unguessable" not in said
        assert "conf" not in said
    with pytest.raises(CannotRender, match="does not take “SHORT_DATE_FORMAT”"):
        render_body("{{ event.time|date:'SHORT_DATE_FORMAT' }}")


def test_render_subject_is_a_template_on_one_line():
    spec = template(texts=(TextSpec("en", "For {{ user.name }}", "hi"),))
    assert render_message(spec, ann(name="Ann\r\nBcc: x"), event()) == ("For Ann Bcc: x", "hi", "en")
    assert render_message(spec, ann(name=""), event())[0] == "For ann", "without a name it is the id"


def test_render_escapes_values_and_keeps_markup_of_the_author():
    body = (
        "<b>{{ user.name }}</b>{{ user.name|upper }}{{ event.data.x|default:'<i>' }}"
        "{{ event.data.x|default:user.name }}"
        "{{ event.data.list|join:'<br>' }}{% for each in event.data.list %}{{ each }}{% endfor %}{{ '<u>' }}"
    )
    spec, who = template(body=body), ann(name="<at>")
    said = render_message(spec, who, event(data={"list": ["<a", "b"]}), shout)[1]
    assert said == "<b>&lt;at></b>&lt;AT><i>&lt;at>&lt;a<br>b&lt;ab<u>"


@each_row(
    "timezone, installation, shown",
    [("America/New_York", "Asia/Shanghai", "07:00"), ("", "Asia/Tokyo", "21:00"), ("Mars/Base", "Asia/Tokyo", "21:00")],
)
def test_render_shows_times_of_customer_else_installation(timezone, installation, shown, settings):
    settings.TIME_ZONE = installation
    assert render_body("{{ event.time|date:'H:i' }}", ann(timezone=timezone)) == shown


def test_render_words_of_dates_are_in_the_language_of_the_text():
    said = {}
    for locale in ("en", "zh_TW", "de", "tlh"):
        spec = template(
            texts=(TextSpec(locale, "", "{{ event.time|date:'F l' }} {{ event.data.n|floatformat:'1g' }}"),)
        )
        said[locale] = render_message(spec, ann(), event(data={"n": 1234.5}))[1]
    assert said == {
        "en": "March Tuesday 1,234.5", "zh_TW": "三月 星期二 1234.5", "de": "März Dienstag 1.234,5",
        "tlh": "三月 星期二 1234.5",
    }  # fmt: skip


#: a customer's locale and the text of a template with these locales; the installation's language is zh-hans
CHOSEN = [
    ("en", ("de", "en", "zh-hans"), "en"), ("en_US", ("zh-hans", "en"), "en"), ("EN-gb", ("en-US", "en"), "en"),
    ("en-GB", ("en", "en_gb"), "en_gb"), ("en_US.UTF-8", ("zh-hans", "en"), "en"),
    ("zh", ("en", "zh-hant", "zh-hans"), "zh-hans"), ("zh_CN", ("zh-TW", "zh-Hans"), "zh-Hans"),
    ("zh_TW", ("zh-hans", "zh-hant"), "zh-hant"), ("zh-Hant-HK", ("zh-hans", "zh-TW", "en"), "zh-TW"),
    ("zh-HK", ("zh_TW", "zh-hant", "zh-hans"), "zh-hant"), ("zh-Hans-HK", ("zh-hant", "zh-hans"), "zh-hans"),
    ("zh-TW", ("en", "zh-hans"), "zh-hans"), ("zh-hans", ("en", "zh-hant"), "zh-hant"),
    ("fr", ("de", "en", "zh-hans"), "zh-hans"), ("", ("de", "en", "zh_CN"), "zh_CN"), ("fr", ("de", "en"), "de"),
    ("fr", ("de",), "de"),
]  # fmt: skip


def test_render_picks_the_nearest_language(settings):
    settings.LANGUAGE_CODE = "zh-hans"
    found = []
    for locale, locales, _ in CHOSEN:
        texts = tuple(TextSpec(each, "", each) for each in locales)
        found.append((locale, locales, render_message(template(texts=texts), ann(locale=locale), event())[2]))
    assert found == CHOSEN


def test_render_template_without_text_fails():
    with pytest.raises(CannotRender, match="no text"):
        render_message(template(texts=()), ann(), event())
