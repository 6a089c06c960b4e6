"""Whatever a machine makes of the API's own description: never a 5xx, and every refusal a problem."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduling.api.generated_requests import OPERATIONS, check_generated_requests
from tests.scheduling.api.serving import Client

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_generated_requests_cause_no_server_error(api: Client, operation: Any) -> None:
    check_generated_requests(api, operation)
