"""Whatever a machine makes of the RPA API's own description: never a 5xx, and every refusal a problem."""

from datetime import UTC, datetime

import pytest
from hypothesis import HealthCheck, given, settings

from rpa_tasks.models import Job
from tests.scheduling.api.generated_requests import OPERATIONS, check_generated_requests
from tests.support.tables import each_row
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def _waiting_job(market):
    at = datetime(2026, 3, 1, tzinfo=UTC)
    Job.objects.create(shop=market.s1, flow=market.sync, due_at=at, planned_at=at)


@pytest.mark.usefixtures("_waiting_job")
@each_row("operation", [each for each in OPERATIONS if "/rpa/" in each.path])
def test_rpa_api_answers_generated_requests_without_5xx(api, operation):
    check_generated_requests(api, operation)


def test_publish_api_answers_generated_jobs_of_known_shop(api, market):
    """The description does not know the shops, so a machine would never get behind the first lookup."""
    (operation,) = [each for each in OPERATIONS if each.label == "POST /api/v1/rpa/jobs"]

    @settings(max_examples=25, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy())
    def story(case):
        if isinstance(case.body, dict):
            case.body |= {"platform": "pdd", "shop_id": "s1", "task_type": "sync_order"}
        headers = {"Authorization": f"Bearer {api.key}"}
        answer = case.call(base_url=api.address, headers=headers, timeout=WAIT_LIMIT)
        assert answer.status_code in (200, 202, 400, 422, 429), answer.text

    story()
