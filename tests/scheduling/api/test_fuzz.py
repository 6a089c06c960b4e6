"""Whatever a machine makes of the API's own description: never a 5xx, and every refusal a problem."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from scheduling.api.app import api as described
from tests.scheduling.api.serving import PATIENCE, Client

pytestmark = pytest.mark.django_db(transaction=True)

EXAMPLES = 25  #: an operation

SCHEMA = schemathesis.openapi.from_dict(described.get_openapi_schema(path_prefix="/api/v1/"))
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_generated_requests_cause_no_server_error(api: Client, operation: Any) -> None:
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy())
    def story(case: Any) -> None:
        headers = {"Authorization": f"Bearer {api.key}"}
        answer = case.call(base_url=api.address, headers=headers, timeout=PATIENCE)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert answer.headers["content-type"] == ["application/problem+json"]

    story()
