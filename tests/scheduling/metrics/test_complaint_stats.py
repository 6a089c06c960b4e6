"""Complaint rates of texts: counted once by hour, compared with the week before, and an alert when one rises."""

from datetime import timedelta
from uuid import UUID

import pytest
from django.utils.timezone import now

from scheduling.db_timeouts import Deadline
from scheduling.ids import first_id_at, new_id
from scheduling.models import Complaint, Event, Template, Touch
from scheduling.monitoring import alerts, complaint_stats
from scheduling.monitoring.complaint_stats import TextComplaints, read_complaint_rates
from tests.scheduling.metrics.test_collectors import read_cluster_metrics
from tests.support.waiting import eventually

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]


class Deliveries:
    """Delivered touches of the node `guide`, some with a complaint."""

    def __init__(self, matrix, record_event):
        matrix.node()
        self.like = Touch.objects.get(pk=record_event().task_ids[0])

    def add(self, count, complaints, *, days_ago, version=1, template="guide"):
        """Add touches. The complaints arrive in the same hour."""
        at = now() - timedelta(days=days_ago)
        values = {each.attname: getattr(self.like, each.attname) for each in Touch._meta.concrete_fields}
        values |= {
            "state": "delivered", "lease_until": None, "settled_at": at, "template_version": version,
            "template_id": Template.objects.get(key=template).pk,
        }  # fmt: skip
        ids = [new_id() for _ in range(count)]
        Touch.objects.bulk_create(
            Touch(**values | {"task_id": each, "root_id": each, "retry_of": each}) for each in ids
        )
        for task_id in ids[:complaints]:
            self.complain(task_id, at)

    def complain(self, touch_id, at):
        event_id = UUID(int=first_id_at(at).int + Complaint.objects.count())
        event = Event.objects.create(
            id=event_id, source="shop", event_id=str(event_id), type="complaint.received", occurred_at=at,
            received_at=at, customer_id=self.like.customer_id, user_id="ann", chat_id="", data={},
        )  # fmt: skip
        Complaint.objects.create(event=event, customer_id=self.like.customer_id, touch_id=touch_id, complained_at=at)


@pytest.fixture
def deliveries(matrix, record_event):
    return Deliveries(matrix, record_event)


def read_rates():
    texts = eventually(lambda: read_complaint_rates(Deadline(60.0)))
    return {(each.template, each.version): each for each in texts}


def find_rising():
    return alerts.read_values().get("complaints_rising")


def test_rates_are_those_of_texts_beside_the_week_before(deliveries, matrix):
    matrix.template("other")
    deliveries.add(250, 1, days_ago=9)
    deliveries.add(250, 5, days_ago=2)
    deliveries.add(200, 1, days_ago=1, version=2)
    deliveries.add(10, 5, days_ago=1, template="other")
    deliveries.add(500, 50, days_ago=15)
    deliveries.add(1, 1, days_ago=0)  # the hour has not ended
    rates = read_rates()
    assert rates == {
        ("guide", 1): TextComplaints("guide", "guide", 1, 250, 0.02, 0.004),
        # Without touches of its own in the week before, a text is compared with its node.
        ("guide", 2): TextComplaints("guide", "guide", 2, 200, 0.005, 0.004),
        ("other", 1): TextComplaints("guide", "other", 1, 10, 0.5, 0.004),
    }
    exported = read_cluster_metrics()
    labels = '{node="guide",template="guide",version="1"}'
    assert exported[f"aftertouch_complaint_rate{labels}"] == 0.02
    assert exported[f"aftertouch_complaint_rate_before{labels}"] == 0.004
    assert exported[f"aftertouch_complaint_touches{labels}"] == 250
    assert find_rising() == {"guide: guide v1": 1}


def test_text_without_comparison_never_rises(deliveries):
    deliveries.add(199, 0, days_ago=9)
    deliveries.add(300, 30, days_ago=2)
    (rate,) = read_rates().values()
    assert rate.before is None
    assert "aftertouch_complaint_rate_before{" not in "".join(read_cluster_metrics())
    assert find_rising() == {}


def test_touches_and_their_complaints_are_counted_once(deliveries, valkey):
    deliveries.add(100, 1, days_ago=2)
    complained = Complaint.objects.get().touch_id
    late = Touch.objects.filter(state="delivered", complaints=None).latest("pk").pk
    assert complained
    for touch_id in (complained, late, late):
        deliveries.complain(touch_id, now() - timedelta(days=1))
    assert read_rates()["guide", 1] == TextComplaints("guide", "guide", 1, 100, 0.02, None)
    deliveries.add(50, 0, days_ago=2)
    assert read_rates()["guide", 1].touches == 100, "the hour was counted again"
    valkey.flushall()
    assert read_rates()["guide", 1].touches == 150
    assert len(valkey.hkeys(complaint_stats.HOURS)) == 14 * 24


def test_call_counts_for_a_bounded_time(deliveries, valkey, monkeypatch):
    """After a loss of Redis no scrape reads two weeks of touches, and no share of them is taken for all."""
    deliveries.add(10, 1, days_ago=2)
    monkeypatch.setattr(complaint_stats, "FILL_SECONDS", 0)
    assert find_rising() is None, "unknown: an alert that is open stays so"
    monkeypatch.setattr(complaint_stats, "FILL_SECONDS", 0.02)
    valkey.hset(complaint_stats.HOURS, "0", "[[], []]")
    calls, counted = 1, 0
    while (texts := read_complaint_rates(Deadline(60.0))) is None:
        calls, before, counted = calls + 1, counted, len(valkey.hkeys(complaint_stats.HOURS))
        assert counted >= before
    assert calls > 1
    assert [each.touches for each in texts] == [10]
    assert not valkey.hexists(complaint_stats.HOURS, "0"), "hours that are over are dropped"
