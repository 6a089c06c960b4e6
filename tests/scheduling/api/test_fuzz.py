"""Whatever a machine makes of the API's own description: never a 5xx, and every refusal a problem."""

import pytest

from tests.scheduling.api.generated_requests import OPERATIONS, check_generated_requests
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db(transaction=True)


@each_row("operation", [each for each in OPERATIONS if "/rpa/" not in each.path])  # tests/rpa_tasks has those
def test_generated_requests_cause_no_server_error(api, operation):
    check_generated_requests(api, operation)
