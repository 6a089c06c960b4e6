"""Subscriptions in the back office, the API and the configuration file."""

import re
from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.urls import reverse

from scheduling import sql
from scheduling.configuration.file.apply import InvalidConfiguration, plan_changes, store_document
from scheduling.configuration.file.section import Stamp
from scheduling.configuration.file.sections import sections
from scheduling.models import WebhookEndpoint, WebhookSubscription
from scheduling.monitoring.collectors import export_cluster_metrics
from tests.scheduling.webhooks.conftest import SECRET, note_changes, pass_time, send_all, write_waiting

ENTRY = {"key": "crm", "url": "https://example.com/in", "secret": SECRET, "events": ["job.ended"],
         "filter": {"shop": ["pdd/s1"]}}  # fmt: skip


def apply_section(*entries):
    document = {"version": 1, "webhooks": list(entries)}
    store_document(document, Stamp("test"), plan_changes(document).confirm)


@pytest.mark.django_db
def test_configuration_file_round_trip_changes_nothing_and_hides_secrets():
    apply_section(ENTRY)
    exported = sections()["webhooks"].export(with_secrets=False)
    assert exported == [{**ENTRY, "url": "(kept)", "secret": "(kept)"}]
    assert plan_changes({"version": 1, "webhooks": exported}).changes == []
    apply_section({**exported[0], "enabled": False})
    row = WebhookSubscription.objects.get()
    assert row.config == {"url": "https://example.com/in", "secret": SECRET}
    assert not row.enabled
    apply_section()
    assert WebhookSubscription.objects.get().retired_at is not None


@pytest.mark.django_db
def test_configuration_file_names_each_wrong_field():
    wrong = {"key": "A b", "url": "http://10.0.0.1/", "secret": "short", "filter": {"user": ["x"]}}
    with pytest.raises(InvalidConfiguration) as caught:
        plan_changes({"version": 1, "webhooks": [wrong | {"events": ["job.ended"]}]})
    paths = {error.field for error in caught.value.errors}
    assert paths >= {f"webhooks[0].{name}" for name in ("key", "url", "secret", "filter")}


def test_back_office_pauses_enables_tests_and_sends_a_range_again(subscribe, receiver, client):
    hook = subscribe()
    client.force_login(User.objects.create_superuser("root"))

    def post(page, **data):
        url = reverse(f"admin:scheduling_webhooksubscription_{page}", args=[hook.pk])
        assert client.post(url, data).status_code == 302

    note_changes(2)
    post("pause_sending")
    send_all()
    assert receiver.calls == []
    assert "暂停" in client.get(reverse("admin:scheduling_webhooksubscription_changelist")).content.decode()
    post("enable_sending")
    post("send_test_message")
    send_all()
    assert [call.json["type"] for call in receiver.calls].count("webhook.test") == 1
    assert len(receiver.calls) == 3
    tomorrow = (sql.now() + timedelta(days=2)).date().isoformat()
    post("send_range_again", since_0="2026-01-01", since_1="00:00:00", until_0=tomorrow, until_1="00:00:00")
    send_all()
    assert sorted(receiver.keys[3:]) == sorted(receiver.keys[:3])


def test_back_office_form_keeps_the_stored_secret(subscribe, client):
    hook = subscribe()
    client.force_login(User.objects.create_superuser("root"))
    url = reverse("admin:scheduling_webhooksubscription_change", args=[hook.pk])
    page = client.get(url).content.decode()
    assert SECRET not in page
    assert re.search(r">\s*正常\s*<", page)
    assert str(hook.config["url"]) not in page
    answer = client.post(url, {"events": ["job.ended"], "enabled": "on", "filter_shop": "pdd/s1"})
    assert answer.status_code == 302
    after = WebhookSubscription.objects.get()
    assert after.config == hook.config
    assert (after.events, after.filter) == (["job.ended"], {"shop": ["pdd/s1"]})
    answer = client.post(url, {"events": ["job.ended"], "secret_secret": "short", "secret_url": "ftp://x"})
    assert answer.context["adminform"].form.errors.keys() == {"secret_secret", "secret_url"}
    answer = client.post(url, {"events": ["job.ended"], "filter_node": "n" * 141})
    assert answer.context["adminform"].form.errors.keys() == {"filter_node"}


def test_only_waiting_messages_show_a_next_attempt(subscribe, client):
    write_waiting(subscribe(), 1)
    client.force_login(User.objects.create_superuser("root"))

    def read_next_attempt():
        page = client.get(reverse("admin:scheduling_webhookmessage_changelist"))
        ((row,),) = [page.context["cl"].result_list]
        return str(page.context["cl"].model_admin.next_attempt(row))

    assert read_next_attempt() != "–"
    send_all()
    assert read_next_attempt() == "–"


def test_failing_receiver_is_reported_also_while_it_is_probed(subscribe, receiver, client):
    """Its rest ends before each probe. A report of that moment must not end the alert."""
    hook = subscribe()
    receiver.script = [500] * 1000

    def is_reported():
        found = 'aftertouch_webhook_resting{webhook="crm"} 1.0' in export_cluster_metrics().decode()
        assert ("无响应的 Webhook：" in client.get(reverse("admin:index")).content.decode()) == found
        return found

    client.force_login(User.objects.create_superuser("root"))
    assert not is_reported()
    note_changes(10, objects=10)
    send_all()
    assert WebhookEndpoint.objects.get(pk=hook.pk).state == "resting"
    assert is_reported()
    assert 'aftertouch_webhook_messages_waiting{webhook="crm"} 10.0' in export_cluster_metrics().decode()
    pass_time(minutes=1)
    assert WebhookEndpoint.objects.get(pk=hook.pk).state == "ok"
    assert is_reported()
    receiver.script = []
    pass_time(minutes=10)
    send_all()
    assert not is_reported()
