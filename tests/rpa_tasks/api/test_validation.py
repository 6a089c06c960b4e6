"""Values that a form could send and a file could not, including Python's extensions of JSON."""

import json
from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.db import DataError, connection, transaction
from hypothesis import given, settings
from hypothesis import strategies as st

from rpa_tasks import configuration
from rpa_tasks.jobs.payloads import unstorable_reason
from rpa_tasks.models import Flow
from scheduling.errors import InvalidInput
from tests.support.tables import each_row


def invalid_fields(check, *rest, **values):
    try:
        check(values, *rest)
    except InvalidInput as error:
        return [each.field for each in error.errors]
    return []


def invalid_flow_fields(**values):
    """By the columns' own bounds, then by the rules of the row."""
    found = set(invalid_fields(configuration.check_flow, **values))
    for name in values.keys() - {"payload_schema"}:
        field = Flow._meta.get_field(name)
        try:
            field.clean(values[name], None)
        except ValidationError:
            found.add(name)
    return found


DEEP = {}
for _ in range(20_000):
    DEEP = {"not": DEEP}
#: Values of a flow, and the fields that are named.
FLOWS = [
    ({}, []),
    ({"payload_schema": {}}, []),
    ({"payload_schema": {"$ref": "#"}}, []),
    ({"payload_schema": {"description": "a \\u0000 by name"}}, []),
    *(
        ({"payload_schema": schema}, ["payload_schema"])
        for schema in (
            {"default": float("nan")}, {"description": "a\0b"}, {"a\0b": 1}, {"description": "\ud800"},
            {"$ref": "file:///etc/passwd"}, {"description": "x" * 70_000}, None, True, DEEP,
        )
    ),
    ({"payload_schema": {"pattern": "("}}, ["payload_schema.pattern"]),
    (
        {"payload_schema": {"properties": {"x": {"minimum": "3"}}}},
        ["payload_schema.properties.x.minimum"],
    ),
    *(({"exit_codes": table}, ["exit_codes"]) for table in ([], None)),
    *(({"exit_codes": {"business": codes}}, ["exit_codes.business"]) for codes in (65, [True], ["65"])),
    ({"exit_codes": {"ok": []}}, ["exit_codes.ok"]),
    ({"retry_delays": [0.5, 30, 604_800]}, []),
    *(
        ({"retry_delays": delays}, ["retry_delays"])
        for delays in (None, "30", [True], ["30"], [0], [-1], [float("nan")], [float("inf")], [1] * 21)
    ),
    *(({"timeout": timedelta(seconds=seconds)}, []) for seconds in (1, 86_400)),
    *(({"timeout": timedelta(seconds=seconds)}, ["timeout"]) for seconds in (0.999, 86_401)),
    *(
        ({"command": command}, ["command"])
        for command in (None, "true {param}", {}, [1], [], ["true"], ["bash", "-c", "x {param}"])
    ),
    *(({"command": command, "needs_browser": False}, ["command"]) for command in (None, 5, "{debug_port}")),
    ({"command": ["true", "{param}", "{debug_port}"], "needs_browser": True}, []),
    ({"command": ["true", "{param}", "{debug_port}"], "needs_browser": False}, ["command"]),
    ({"path": ["/opt/rpa/bin"]}, []),
    *(
        ({"environment": names}, ["environment"])
        for names in (None, "PATH", [1], [""], ["A=B"], ["1A"], ["LANG"], ["AFTERTOUCH_SECRETS_KEYS"])
    ),
    ({"environment": None, "env": {"RPA_MODE": "fast"}}, ["environment"]),
    ({"environment": ["RPA_MODE"], "env": {"RPA_MODE": "fast"}}, ["env"]),
    *(({"path": path}, ["path"]) for path in (None, "/opt", [1], ["opt"], ["/a:/b"], ["/a\0"], ["/a"] * 21)),
    (
        {"task_type": "A B", "command": [], "timeout": timedelta(0), "exit_codes": []},
        ["task_type", "command", "timeout", "exit_codes"],
    ),
]  # fmt: skip


@each_row("values, fields", FLOWS)
def test_check_flow_names_each_invalid_value(values, fields):
    assert invalid_flow_fields(**values) == set(fields)


@pytest.mark.django_db
def test_check_shop_refuses_own_queue_named_like_a_tier():
    def refuses(shop_id, own):
        return invalid_fields(configuration.check_shop, shop_id=shop_id, dedicated_queue=own) == ["shop_id"]

    shops = [("high", True), ("high", False), ("high.1", True)]
    assert [refuses(*shop) for shop in shops] == [True, False, False]


words = st.text(max_size=3) | st.sampled_from(["\0", "\\u0000", "\\\\u0000", "\\\0", "\ud800"])


@pytest.mark.django_db
@settings(max_examples=50)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | words,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
        max_leaves=8,
    )
)
def test_unstorable_reason_matches_postgresql(value):
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT %s::jsonb", [json.dumps(value)])
        stored = True
    except DataError:
        stored = False
    assert stored == (unstorable_reason(value) == "")
