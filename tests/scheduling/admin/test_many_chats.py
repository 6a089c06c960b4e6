"""Communities created by events are numerous; no form lists them all."""

from __future__ import annotations

import pytest
import redis
from django.db import connection
from django.test import Client

from scheduling.models import AlertReceiver, ChannelConfig, Community
from tests.scheduling.admin.conftest import SaveForm, Url
from tests.scheduling.core.receivers import ScriptedReceiver
from tests.support.matrix import MatrixBuilder
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db


@pytest.fixture
def chats() -> None:
    """One with a name, one with a robot, and one that was counted."""
    Community.objects.create(chat_id="named", name="Regulars")
    Community.objects.create(chat_id="robot", targets={"webhook": {"url": "https://example.com/in"}})
    with connection.cursor() as cursor:  # as delivery does
        cursor.execute("INSERT INTO scheduling_community (chat_id, name, targets) VALUES ('counted', '', '')")


@pytest.mark.usefixtures("chats")
def test_alert_receiver_offers_configured_communities(editor: Client, admin_url: Url, save_form: SaveForm) -> None:
    def offered(url: str) -> list[str]:
        return [row.chat_id for row in read_context(editor, url)["adminform"].form.fields["community"].queryset]

    assert offered(admin_url("alertreceiver_add")) == ["named", "robot"]
    hook = ChannelConfig.objects.create(key="ops", kind="webhook", config={"url": "https://example.com/in"})
    counted = Community.objects.get(chat_id="counted")
    row = AlertReceiver.objects.create(pk=1, channel=hook, community=counted)
    url = admin_url("alertreceiver_change", row.pk)
    assert offered(url) == ["counted", "named", "robot"], "what was chosen stays"
    save_form(url, address="a@b.example")
    row.refresh_from_db()
    assert (row.address, row.community) == ("a@b.example", counted)


@pytest.mark.usefixtures("chats")
def test_template_test_accepts_any_known_community(
    editor: Client, admin_url: Url, matrix: MatrixBuilder, receiver: ScriptedReceiver, valkey: redis.Redis
) -> None:
    template = matrix.template("guide")
    hook = ChannelConfig.objects.create(key="ops", kind="webhook", config={"url": receiver.url})
    url = admin_url("template_send_test", template.pk)
    page = editor.get(url).content.decode()
    assert ("named" in page, "Regulars" in page, "robot" in page, "counted" in page) == (True, True, True, False)
    given = {"channel": hook.pk, "user_id": "ann", "event_data": "{}"}
    page = editor.post(url, given | {"community": "counted"}).content.decode()
    assert "Delivered" in page
    assert receiver.calls[0].json["data"]["chat_id"] == "counted"
    form = editor.post(url, given | {"community": "nowhere"}).context["form"]
    assert list(form.errors) == ["community"]
