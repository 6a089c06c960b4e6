"""The shipped steps of a missing answer, from the watcher to the channel."""

import threading
from datetime import timedelta

import pytest
from django.core.management import call_command

from scheduling.models import Node, Touch
from sessions.detection.policies import read_policies
from sessions.detection.watcher import Watcher
from sessions.models import SilencePolicy
from sessions.policy import CUSTOMER
from tests.scheduling.core.conftest import _sending, deliver_when_due

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("_sending")]
__all__ = ["_sending"]


def test_each_shipped_step_is_delivered_until_an_agent_answers(chats):
    call_command("bootstrap", verbosity=0)
    steps = ["sla-remind", "sla-supervisor", "sla-queue"]
    for node in Node.objects.filter(key__in=steps):
        node.enabled = True
        node.save()
    SilencePolicy.objects.create(key="sla", threshold=timedelta(seconds=60), max_nudges=3, growth=1, after=CUSTOMER)
    chats.store.push(read_policies())
    chats.pass_time(-200)
    chats.user(tag="sla", chat_id="room")
    watcher = Watcher(chats.store, threading.Event())
    delivered = []
    for _ in range(2):
        chats.pass_time(61)
        watcher.run_once()
        (touch,) = deliver_when_due(
            *Touch.objects.filter(state__in=("scheduled", "queued")).values_list("pk", flat=True)
        )
        delivered.append((touch.node.key, touch.state))
    assert delivered == [(each, "delivered") for each in steps[:2]]
    chats.pass_time(61)
    watcher.run_once()
    chats.agent()
    (touch,) = deliver_when_due(*Touch.objects.filter(state__in=("scheduled", "queued")).values_list("pk", flat=True))
    assert (touch.node.key, touch.state, touch.reason) == ("sla-queue", "suppressed", "answered")
