"""PostgreSQL stores and returns unchanged what the strict parser accepts."""

import json

import pytest
from django.db import connection
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb

from scheduling.api.events import parse_event
from scheduling.errors import InvalidInput
from scheduling.strict_text import LARGEST, MAX_DEPTH, SMALLEST, decode_json
from tests.support.tables import each_row

ANY_TEXT = st.text(st.characters())
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | ANY_TEXT,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(ANY_TEXT, children, max_size=4),
    max_leaves=20,
)


@pytest.mark.django_db
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=ANY_JSON)
def test_accepted_json_round_trips_through_database(value):
    try:
        decoded = decode_json(json.dumps(value).encode())
    except InvalidInput:
        return
    assert decoded == value
    with connection.cursor() as cursor:
        cursor.execute("SELECT %s::jsonb", [Jsonb(decoded)])
        (stored,) = cursor.fetchone()
    # PostgreSQL writes a float that is whole without its exponent, which reads as an integer.
    assert json.loads(stored, parse_int=float) == json.loads(json.dumps(decoded), parse_int=float)


@pytest.mark.django_db
@each_row("number", [SMALLEST, -(2**53) - 1, 0, 2**53 + 1, LARGEST])
def test_whole_number_keeps_every_digit(number):
    with connection.cursor() as cursor:
        cursor.execute("SELECT %s::jsonb", [Jsonb(decode_json(str(number).encode()))])
        assert cursor.fetchone() == (str(number),)


@given(
    raw=st.dictionaries(
        st.sampled_from(["specversion", "id", "source", "type", "subject", "time", "data", "datacontenttype", "x"]),
        ANY_JSON,
    )
)
def test_event_parser_handles_any_values(raw):
    found = None
    try:
        found = parse_event(raw)
    except InvalidInput as error:
        found = error.errors
        assert {bool(each.message) for each in found} == {True}
    assert found


def test_json_depth_limit_is_exact():
    assert decode_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    with pytest.raises(InvalidInput):
        decode_json(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))
