"""Receivers that are gone: looked up by digest, without a reload of the configuration, and not for ever."""

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from scheduling import sql
from scheduling.configuration import snapshot
from scheduling.delivery import routing
from scheduling.models import ChannelConfig, Community, DisabledTarget
from scheduling.operations import commands, retention
from scheduling.policy.specs import CustomerSpec
from tests.scheduling.core.conftest import deliver_when_due, pass_time

pytestmark = pytest.mark.django_db(transaction=True)


def disable(channel, *addresses):
    routing.store_disabled_targets((channel.pk, routing.digest_address(each), "", "gone") for each in addresses)


def test_disabled_target_keeps_loaded_configuration(matrix, hook):
    before = snapshot.current()
    disable(hook, "https://a.example")
    assert DisabledTarget.objects.count() == 1
    assert snapshot.current() is before
    DisabledTarget.objects.all().delete()
    assert snapshot.current() is before


@pytest.mark.usefixtures("fresh_tables")
def test_find_disabled_reads_only_the_batch(matrix, hook):
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO scheduling_disabledtarget (channel_id, target_digest, chat_id, reason, disabled_at)"
            " SELECT %s, md5(n::text) || md5(n::text), '', '', now() FROM generate_series(1, 20000) AS n",
            [hook.pk],
        )
        cursor.execute("ANALYZE scheduling_disabledtarget")
        disable(hook, "https://a.example")
        plan_of = {"channels": [hook.pk], "digests": ["x"], "kept": timedelta(days=1)}
        plan = "\n".join(row[0] for row in sql.rows(f"EXPLAIN {routing._AMONG}", plan_of))
    assert "Seq Scan on scheduling_disabledtarget" not in plan
    wanted = [(hook.pk, routing.digest_address(each)) for each in ("https://a.example", "https://b.example")]
    assert routing.find_disabled(wanted) == {wanted[0]}


def test_disabled_target_expires_and_is_deleted(matrix, hook, settings):
    settings.AFTERTOUCH_DISABLED_TARGET_DAYS = 30
    disable(hook, "https://a.example", "https://b.example")
    target = (hook.pk, routing.digest_address("https://a.example"))
    pass_time(days=31)
    assert routing.find_disabled([target]) == set()

    disable(hook, "https://a.example")  # it responded so again
    assert routing.find_disabled([target]) == {target}
    assert retention.delete_expired_rows()["scheduling_disabledtarget"] == 1
    assert DisabledTarget.objects.get().target_digest == target[1]


def test_new_customer_address_enables_target(shop):
    mail = shop.create_channel("mail")
    commands.update_customer("ann", {"addresses": {"email": "ann@example.com"}})
    disable(mail, "ann@example.com", "bob@example.com")
    commands.update_customer("ann", {"name": "Ann", "addresses": {"email": "ann@example.com"}})
    assert DisabledTarget.objects.count() == 2  # the same address: nothing new is known about it
    commands.update_customer("ann", {"addresses": {"email": "ann@example.org"}})
    assert DisabledTarget.objects.get().target_digest == routing.digest_address("bob@example.com")
    commands.update_customer("ann", {"addresses": {"email": "bob@example.com"}})
    assert not DisabledTarget.objects.exists()


def test_new_community_or_channel_address_enables_target(matrix, hook):
    community = Community.objects.create(chat_id="c1", targets={"hook": {"url": "https://a.example/c1"}})
    disable(hook, "https://a.example/c1", hook.config["url"])
    community = Community.objects.get(pk=community.pk)
    community.targets = {"hook": {"url": "https://b.example/c1"}}
    community.save()
    assert DisabledTarget.objects.count() == 1
    channel = ChannelConfig.objects.get(pk=hook.pk)
    channel.config = {"url": "https://b.example"}
    channel.save()
    assert not DisabledTarget.objects.exists()


def test_delivery_reads_disabled_targets_twice_at_most(shop, hook):
    shop.node(channel=hook)
    disable(hook, "https://elsewhere.example")
    task_ids = shop.plan(10)
    with CaptureQueriesContext(connection) as queries:
        rows = deliver_when_due(*task_ids)
    assert {row.state for row in rows} == {"delivered"}
    assert 1 <= sum("scheduling_disabledtarget" in each["sql"] for each in queries) <= 2


def test_target_for_with_a_lookup_reads_the_database(matrix, hook):
    spec = snapshot.current().channels[hook.pk]
    disable(hook, hook.config["url"])
    with pytest.raises(routing.NoTarget) as raised:
        routing.target_for(spec, routing.channel_of(spec), CustomerSpec(1, "ann"), "", {}, routing.TargetLookup())
    assert raised.value.reason == "target_disabled"
