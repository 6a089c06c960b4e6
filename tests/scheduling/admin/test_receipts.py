"""Receipts in the back office: on the pages of touch, node and customer, and in the CSV export."""

from __future__ import annotations

import pytest
from django.test import Client
from django.utils import translation

from scheduling.admin.touches.timeline import build_timeline
from scheduling.channels.base import Report
from scheduling.models import Touch
from scheduling.receipts import record_reports
from tests.scheduling.admin.conftest import Url
from tests.scheduling.admin.test_list_export import read_csv_rows
from tests.scheduling.core.conftest import deliver
from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def read(matrix: MatrixBuilder, record_event: RecordEvent) -> Touch:
    """A touch that was read and whose link was opened, beside one without receipts."""
    matrix.node()
    for user in ("ann", "bob"):
        deliver(record_event(user=user).task_ids)
    touch = Touch.objects.get(customer__user_id="ann")
    record_reports([Report("read", delivery_key=touch.root_id, detail="<b>phone</b>")])
    record_reports([Report("clicked", delivery_key=touch.root_id)])
    return touch


def test_touch_shows_its_receipts(viewer: Client, admin_url: Url, read: Touch) -> None:
    page = viewer.get(admin_url("touch_change", read.pk))
    assert [each.title for each in page.context["moments"]][-2:] == ["Receipt: Read", "Receipt: Link opened"]
    assert "<b>phone</b>" not in page.content.decode()
    with translation.override("zh-hans"):
        assert build_timeline(read)[-1].title == "回执：已点击链接"


def test_node_shows_the_shares_of_its_receipts(
    viewer: Client, admin_url: Url, read: Touch, matrix: MatrixBuilder
) -> None:
    page = viewer.get(admin_url("node_change", read.node_id))
    figures = {str(each.words): (each.value, each.hint) for each in page.context["receipt_figures"]}
    assert figures["Read"] == (1, "50.0 % of 2 delivered")
    assert figures["Bounced"] == (0, "0.0 % of 2 delivered")
    assert "Receipts of the last seven days" in page.content.decode()
    other = viewer.get(admin_url("node_change", matrix.node("other").pk))
    assert "Receipts of the last seven days" not in other.content.decode()


def test_export_lists_the_kinds_of_receipts(operator: Client, admin_url: Url, read: Touch) -> None:
    found = {row["user id"]: row["receipts"] for row in read_csv_rows(operator.get(admin_url("touch_export", "csv")))}
    assert found == {"ann": "Link opened, Read", "bob": ""}
