"""A message template is bounded in time and memory for any text and data."""

import contextlib
import json
import re
import subprocess
import sys
from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.policy.specs import TextSpec
from scheduling.templating import MAX_TEXT, CannotRender, register, render_message
from tests.scheduling.core.sample_data import ann, event, template

MOST_SECONDS = 1.0  #: of processor time; the slowest takes a tenth
MOST_BYTES = 32 * 1024 * 1024


def test_template_bombs_fail_within_limits():
    program = [sys.executable, "-m", "tests.scheduling.core.template_bombs"]
    measured = json.loads(subprocess.run(program, check=True, capture_output=True, timeout=240).stdout)
    assert {
        name: outcome
        for name, outcome in measured.items()
        if not re.match("CannotRender: |InvalidTemplate: ", outcome["ended"])
        or outcome["seconds"] > MOST_SECONDS
        or outcome["bytes"] > MOST_BYTES
    } == {}


# --- properties -------------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    ["", "a", "tea", "茶", "<b>", "3", "-1.5", "1e999", "%s", "items", "2026-03-03", "0001-01-01T00:00:00Z", "x" * 300]
)
DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**120) | st.floats() | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "items", "get", "0"]), inner, max_size=3)
    ),
    max_leaves=8,
)
CONSTANTS = st.sampled_from(["1", "0", "2.5", "'a'", "'%s'", '"<b>"', "''", "-3", "1e308", "'Y-m-d'", "'2gu'"])
PATHS = st.sampled_from(
    ["event.data", "event.data.a", "event.data.a.b", "event.data.items", "event.data.a.0", "event.data.get", "x",
     "event.data.b.-1", "event.time", "event.time.year", "user.name", "user.level", "forloop.counter",
     "event.data.a.__class__", "customer.tags"]
)  # fmt: skip
FILTERS = st.sampled_from([*sorted(register.filters), "safe", "pprint"])
EXPRESSIONS = st.builds(
    "{}{}".format,
    CONSTANTS | PATHS,
    st.lists(st.builds("|{}".format, FILTERS) | st.builds("|{}:{}".format, FILTERS, CONSTANTS | PATHS), max_size=3).map(
        "".join
    ),
)
CONDITIONS = st.recursive(
    EXPRESSIONS,
    lambda inner: (
        st.builds(
            "{} {} {}".format,
            inner,
            st.sampled_from(["==", "!=", "<", ">=", "in", "not in", "and", "or", "is"]),
            inner,
        )
        | st.builds("not {}".format, inner)
    ),
    max_leaves=4,
)
STATEMENTS = st.one_of(
    st.builds("{{{{ {} }}}}".format, EXPRESSIONS),
    st.builds("{{% if {} %}}{{{{ {} }}}}{{% endif %}}".format, CONDITIONS, EXPRESSIONS),
    st.builds(
        "{{% for x in {} %}}{{{{ {} }}}}{{{{ forloop.counter }}}}{{% endfor %}}".format, EXPRESSIONS, EXPRESSIONS
    ),
)
TEXTS = st.lists(STATEMENTS, min_size=1, max_size=3).map("".join)
REPR = re.compile(
    r"None|True|False|<[a-z_.-]+ [a-z]|<function|<built-in|object at 0x|Missing|Undefined|\binf\b|\bnan\b"
)


def rendered(body, data, subject=""):
    spec = template(texts=(TextSpec("en", subject, body),))
    return render_message(spec, ann(), event(data=data, occurred_at=datetime(2026, 3, 3, tzinfo=UTC)))


@given(TEXTS, st.dictionaries(st.sampled_from(["a", "b", "items"]), DATA, max_size=3))
def test_render_any_text_raises_only_cannot_render(body, data):
    before = repr(data)
    with contextlib.suppress(CannotRender):
        _, said, _ = rendered(body, data, subject=body)
        assert len(said) <= MAX_TEXT
        assert not REPR.search(said), said
    assert repr(data) == before


@given(st.text(st.sampled_from("{}%#- '\"()[]|.,:~=*abuser.ifendforset0x9_\n")))
def test_render_garbage_raises_only_cannot_render(body):
    with contextlib.suppress(CannotRender):
        rendered(body, {})


@settings(max_examples=50)
@given(DATA)
def test_render_any_value_prints_its_text_or_fails(value):
    try:
        _, said, _ = rendered("{{ event.data.a }}", {"a": value})
    except CannotRender:
        assert value is None or not isinstance(value, str | bool | int) or abs(int(value)) >= 10**100
        return
    expected = {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
    assert said == expected
