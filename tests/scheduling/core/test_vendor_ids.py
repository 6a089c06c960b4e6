"""Vendors' ids of sent messages: stored with the delivery, kept for their own time."""

from datetime import timedelta

import pytest
from django.db import connection
from django.utils.timezone import now

from scheduling.channels.base import Delivered, Report
from scheduling.ids import first_id_at
from scheduling.models import ChannelConfig, DeliveryReceipt, VendorMessage
from scheduling.operations import retention
from scheduling.receipts import record_reports
from tests.scheduling.core.conftest import deliver_when_due

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def sent(shop):
    """Ann's delivery, to which the vendor gave an id; to Bob's it gave none."""
    shop.node(channel=shop.create_channel())
    shop.fake_channel.play = lambda message: Delivered("ok", 200, "v-ann" if message.user_id == "ann" else "")
    ann, bob = deliver_when_due(*shop.record_event().task_ids, *shop.record_event(user="bob").task_ids)
    assert bob.state == "delivered"
    return ann


def test_ids_and_receipts_are_deleted_after_their_own_times(sent, settings):
    record_reports([Report("read", channel=ChannelConfig.objects.get(kind="fake").key, vendor_id="v-ann")])
    assert DeliveryReceipt.objects.get().delivery_key == VendorMessage.objects.get().delivery_key == sent.root_id
    settings.AFTERTOUCH_VENDOR_IDS_DAYS, settings.AFTERTOUCH_RETENTION_DAYS = 10, 40
    _age_ids(VendorMessage, days=11)
    _age_ids(DeliveryReceipt, days=11)
    retention.delete_expired_rows()
    assert (VendorMessage.objects.count(), DeliveryReceipt.objects.count()) == (0, 1)
    _age_ids(DeliveryReceipt, days=100)
    retention.delete_expired_rows()
    assert not DeliveryReceipt.objects.exists()


def _age_ids(model, *, days):
    """Give the only row the id that it would have if it had been stored that long ago."""
    old = first_id_at(now() - timedelta(days=days))
    with connection.cursor() as cursor:
        cursor.execute(f'UPDATE "{model._meta.db_table}" SET id = %s', [old])
