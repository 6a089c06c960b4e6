"""Values that a form could send and a file could not, including Python's extensions of JSON."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.db import DataError, connection, transaction
from hypothesis import given
from hypothesis import strategies as st

from rpa_tasks import configuration
from rpa_tasks.jobs.payloads import unstorable_reason
from scheduling.errors import InvalidInput
from tests.rpa_tasks.api.conftest import Market
from tests.support.tables import each_row


def invalid_fields(check: Any, *rest: Any, **values: Any) -> list[str]:
    try:
        check(values, *rest)
    except InvalidInput as error:
        return [each.field for each in error.errors]
    return []


def test_checks_accept_absent_values() -> None:
    assert (
        invalid_fields(configuration.check_platform)
        == invalid_fields(configuration.check_flow)
        == invalid_fields(configuration.check_shop)
        == []
    )


@each_row(
    "schema, fields",
    [
        ({}, []),
        ({"$ref": "#"}, []),
        ({"description": "a \\u0000 by name"}, []),
        ({"default": float("nan")}, ["payload_schema"]),
        ({"description": "a\0b"}, ["payload_schema"]),
        ({"a\0b": 1}, ["payload_schema"]),
        ({"description": "\ud800"}, ["payload_schema"]),
        ({"$ref": "file:///etc/passwd"}, ["payload_schema"]),
        ({"pattern": "("}, ["payload_schema.pattern"]),
        ({"properties": {"x": {"minimum": "3"}}}, ["payload_schema.properties.x.minimum"]),
        ({"description": "x" * 70_000}, ["payload_schema"]),
        (None, ["payload_schema"]),
        (True, ["payload_schema"]),
    ],
)
def test_check_flow_validates_payload_schema(schema: Any, fields: list[str]) -> None:
    assert invalid_fields(configuration.check_flow, payload_schema=schema) == fields


def test_check_flow_refuses_deep_schema() -> None:
    deep: dict[str, Any] = {}
    for _ in range(20_000):
        deep = {"not": deep}
    assert invalid_fields(configuration.check_flow, payload_schema=deep) == ["payload_schema"]


@each_row("table", [[], None, {"business": 65}, {"business": [True]}, {"business": ["65"]}, {"ok": []}])
def test_check_flow_refuses_invalid_exit_codes(table: Any) -> None:
    assert invalid_fields(configuration.check_flow, exit_codes=table)


@each_row("delays", [None, "30", [True], ["30"], [0], [-1], [float("nan")], [float("inf")], [1] * 21])
def test_check_flow_validates_retry_delays(delays: Any) -> None:
    assert invalid_fields(configuration.check_flow, retry_delays=delays) == ["retry_delays"]
    assert invalid_fields(configuration.check_flow, retry_delays=[0.5, 30, 604_800]) == []


@each_row("names", [None, "PATH", [1], [""], ["A=B"], ["1A"], ["LANG"], ["AFTERTOUCH_SECRETS_KEYS"]])
def test_check_flow_refuses_invalid_environment(names: Any) -> None:
    assert set(invalid_fields(configuration.check_flow, environment=names)) == {"environment"}


@each_row("seconds, fits", [(0.999, False), (1, True), (86_400, True), (86_401, False)])
def test_check_flow_validates_timeout(seconds: float, fits: bool) -> None:
    assert invalid_fields(configuration.check_flow, timeout=timedelta(seconds=seconds)) == ([] if fits else ["timeout"])


@each_row("command", [None, "true {param}", {}, [1], [], ["true"], ["bash", "-c", "x {param}"]])
def test_check_flow_refuses_invalid_command(command: Any) -> None:
    assert set(invalid_fields(configuration.check_flow, command=command)) == {"command"}


def test_check_flow_reports_all_errors() -> None:
    fields = invalid_fields(configuration.check_flow, task_type="A B", command=[], timeout=timedelta(0), exit_codes=[])
    assert fields == ["task_type", "command", "timeout", "exit_codes"]


@pytest.mark.django_db
def test_check_shop_refuses_own_queue_named_like_a_tier() -> None:
    def refuses(shop_id: str, own: bool) -> bool:
        return invalid_fields(configuration.check_shop, shop_id=shop_id, dedicated_queue=own) == ["shop_id"]

    shops = [("high", True), ("high", False), ("high.1", True)]
    assert [refuses(*shop) for shop in shops] == [True, False, False]


def test_check_shop_refuses_used_profile(market: Market) -> None:
    market.shop("s3", profile_id="kept")
    taken = configuration.map_profiles_to_shops([market.s1, market.s2, *market.pdd.shops.filter(shop_id="s3")])
    assert taken == {"pdd-s1": "pdd/s1", "pdd-s2": "pdd/s2", "kept": "pdd/s3"}
    for profile in ("kept", "pdd-s1"):
        assert invalid_fields(configuration.check_shop, taken, platform="pdd", shop_id="s4", profile_id=profile) == [
            "profile_id"
        ]
    assert invalid_fields(configuration.check_shop, taken, platform="pdd", shop_id="s4", profile_id="") == []
    assert invalid_fields(configuration.check_shop, taken, platform="pdd", shop_id="s1") == ["profile_id"]


words = st.text(max_size=3) | st.sampled_from(["\0", "\\u0000", "\\\\u0000", "\\\0", "\ud800"])


@pytest.mark.django_db
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | words,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
        max_leaves=8,
    )
)
def test_unstorable_reason_matches_postgresql(value: Any) -> None:
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT %s::jsonb", [json.dumps(value)])
        stored = True
    except DataError:
        stored = False
    assert stored == (unstorable_reason(value) == "")


@each_row("path", [None, "/opt", [1], ["opt"], ["/a:/b"], ["/a\0"], ["/a"] * 21])
def test_check_flow_validates_path(path: Any) -> None:
    assert set(invalid_fields(configuration.check_flow, path=path)) == {"path"}
    assert invalid_fields(configuration.check_flow, path=["/opt/rpa/bin"]) == []


def test_debug_port_requires_browser() -> None:
    words = ["true", "{param}", "{debug_port}"]
    assert invalid_fields(configuration.check_flow, command=words, needs_browser=False) == ["command"]
    assert invalid_fields(configuration.check_flow, command=words, needs_browser=True) == []


def test_check_flow_refuses_unknown_dedupe_by() -> None:
    assert invalid_fields(configuration.check_flow, dedupe_by="shop") == ["dedupe_by"]
