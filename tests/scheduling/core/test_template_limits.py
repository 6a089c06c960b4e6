"""A message template is bounded in time and memory for any text and data."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.policy.specs import TextSpec
from scheduling.templating.rendering import render_message
from scheduling.templating.values import FILTERS, MAX_TEXT, CannotRender
from tests.scheduling.core.sample_data import ann, event, template
from tests.scheduling.core.template_bombs import BOMBS

MOST_SECONDS = 0.1  #: of processor time
MOST_BYTES = 16 * 1024 * 1024


@pytest.fixture(scope="module")
def measured() -> Any:
    program = [sys.executable, "-m", "tests.scheduling.core.template_bombs"]
    return json.loads(subprocess.run(program, check=True, capture_output=True, timeout=120).stdout)


@pytest.mark.parametrize("name", BOMBS)
def test_template_bomb_fails_within_limits(name: str, measured: Any) -> None:
    outcome = measured[name]
    assert re.match("CannotRender: |TooMuchWork: |InvalidTemplate: ", outcome["ended"]), outcome
    assert outcome["seconds"] < MOST_SECONDS, outcome
    assert outcome["bytes"] < MOST_BYTES, outcome


# --- properties -------------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(["", "a", "tea", "茶", "<b>", "3", "-1.5", "1e999", "%s", "items", "a,b", "x" * 300])
DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**120) | st.floats() | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "items", "get", "0"]), inner, max_size=3)
    ),
    max_leaves=8,
)
CONSTANTS = st.sampled_from(["1", "0", "2.5", "'a'", "'%s'", "none", "true", "''", "-3", "1e308", "10 ** 2"])
PATHS = st.sampled_from(
    ["event.data", "event.data.a", "event.data.a.b", "event.data['items']", "event.data.a[0]", "event.data.get", "x",
     "event.data.a[:2]", "event.data.b[-1]", "event.time", "event.time.year", "user.name", "user.level", "loop.index",
     "event.data.a.__class__", "event.data[event.data.b]", "event.time.strftime('%H')", "event.data.b.items()"]
)  # fmt: skip


def wrapped(inner: Any) -> Any:
    arguments = st.lists(inner, max_size=2).map(", ".join)
    names = st.sampled_from([*sorted(FILTERS), "format", "pprint"])
    tests = st.sampled_from(["defined", "none", "undefined", "string"])
    operators = st.sampled_from(
        ["+", "-", "*", "/", "%", "~", "==", "!=", "<", ">=", "in", "not in", "and", "or", "**"]
    )
    return st.one_of(
        st.builds("({} {} {})".format, inner, operators, inner),
        st.builds("{}|{}({})".format, inner, names, arguments),
        st.builds("{}|join(attribute={})".format, inner, inner),
        st.builds("'%.2f'|format({})".format, inner),
        st.builds("({} is {})".format, inner, tests),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("({} in [{}, {}])".format, inner, inner, inner),
        st.builds("(not {})".format, inner),
        st.builds("(-{})".format, inner),
    )


EXPRESSIONS = st.recursive(CONSTANTS | PATHS, wrapped, max_leaves=6)
STATEMENTS = st.one_of(
    st.builds("{{{{ {} }}}}".format, EXPRESSIONS),
    st.builds("{{% if {} %}}{{{{ {} }}}}{{% endif %}}".format, EXPRESSIONS, EXPRESSIONS),
    st.builds("{{% for x in {} %}}{{{{ {} }}}}{{{{ loop.index }}}}{{% endfor %}}".format, EXPRESSIONS, EXPRESSIONS),
    st.builds("{{% for x in {} if {} %}}{{{{ x }}}}{{% endfor %}}".format, EXPRESSIONS, EXPRESSIONS),
)
TEXTS = st.lists(STATEMENTS, min_size=1, max_size=3).map("".join)
REPR = re.compile(
    r"None|True|False|<[a-z_.-]+ [a-z]|<function|<built-in|object at 0x|Missing|Undefined|\binf\b|\bnan\b"
)


def rendered(body: str, data: Any, subject: str = "") -> tuple[str, str, str]:
    spec = template(texts=(TextSpec("en", subject, body),))
    return render_message(spec, ann(), event(data=data, occurred_at=datetime(2026, 3, 3, tzinfo=UTC)))


@given(TEXTS, st.dictionaries(st.sampled_from(["a", "b", "items"]), DATA, max_size=3))
def test_render_any_text_raises_only_cannot_render(body: str, data: dict[str, Any]) -> None:
    try:
        _, said, _ = rendered(body, data, subject=body)
    except CannotRender:
        return
    assert len(said) <= MAX_TEXT
    assert not REPR.search(said), said


@given(st.text(st.sampled_from("{}%#- '\"()[]|.,:~=*abuser.ifendforset0x9_\n")))
def test_render_garbage_raises_only_cannot_render(body: str) -> None:
    with contextlib.suppress(CannotRender):
        rendered(body, {})


@given(DATA)
def test_render_any_value_prints_its_text_or_fails(value: Any) -> None:
    try:
        _, said, _ = rendered("{{ event.data.a }}", {"a": value})
    except CannotRender:
        assert value is None or not isinstance(value, str | bool | int) or abs(int(value)) >= 10**100
        return
    expected = {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
    assert said == expected


@given(TEXTS, st.dictionaries(st.sampled_from(["a", "b", "items"]), DATA, max_size=3))
def test_render_any_text_does_not_change_data(body: str, data: dict[str, Any]) -> None:
    before = repr(data)
    with contextlib.suppress(CannotRender):
        rendered(body, data)
    assert repr(data) == before
