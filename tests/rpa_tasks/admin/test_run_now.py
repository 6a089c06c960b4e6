"""A user who may run but not edit changes no settings of others."""

from __future__ import annotations

import pytest
from django.test import Client

from rpa_tasks.models import Job
from tests.rpa_tasks.admin.conftest import Market, url

pytestmark = pytest.mark.django_db


def test_run_now_by_operator_keeps_waiting_payload(operator: Client, market: Market) -> None:
    job = market.waiting("s1", payload={"since": "monday"}, priority=2)
    address = f"{url('shop_run_now')}?shops={market.s1.pk},{market.s2.pk}"
    assert "payload" not in operator.get(address).context["form"].fields
    operator.post(address, {"task_type": "sync_order", "priority": "0", "payload": '{"since": "ever"}'})
    job.refresh_from_db()
    assert (job.payload, job.priority, job.requests) == ({"since": "monday"}, 0, 2)
    assert Job.objects.get(shop=market.s2).payload == {}
