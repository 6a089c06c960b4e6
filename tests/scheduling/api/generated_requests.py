"""Requests generated from the API's own description."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, settings

from config.urls import api as described
from tests.scheduling.api.serving import Client
from tests.support.waiting import WAIT_LIMIT

EXAMPLES = 10  #: an operation
OPERATIONS = [
    found.ok()
    for found in schemathesis.openapi.from_dict(
        described.get_openapi_schema(path_prefix="/api/v1/")
    ).get_all_operations()
]


@schemathesis.serializer("message/rfc822", "text/csv")
def serialize_text(_: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def check_generated_requests(api: Client, operation: Any) -> None:
    """Send generated requests of an operation: never a 5xx, and every refusal is a problem."""

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy())
    def story(case: Any) -> None:
        headers = {"Authorization": f"Bearer {api.key}"}
        for _ in range(10):  # an overloaded server refuses what is late, and the client asks again
            answer = case.call(base_url=api.address, headers=headers, timeout=WAIT_LIMIT)
            if answer.status_code != 503:
                break
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert answer.headers["content-type"] == ["application/problem+json"]

    story()
