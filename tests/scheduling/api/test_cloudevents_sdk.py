"""What the official CloudEvents SDK sends by default is accepted in each of its encodings."""

import json

import pytest
import requests
from cloudevents.v1.conversion import to_binary, to_dict, to_structured
from cloudevents.v1.http import CloudEvent

from scheduling.models import Event
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)
DATA = {"chat_id": "c1", "title": "资料"}


def event(**changes):
    usual = {"type": "material.downloaded", "source": "/shop", "subject": "ann"}
    return CloudEvent(usual | changes, DATA)


def batch(*events):
    """The SDK writes single events only, so the array is made of what it writes."""
    items = [json.loads(to_structured(each)[1]) for each in events]
    return {"content-type": "application/cloudevents-batch+json"}, json.dumps(items).encode()


def post(api, encoded):
    headers, body = encoded
    headers = {"Authorization": f"Bearer {api.key}", **headers}
    return requests.post(f"{api.address}/api/v1/events", data=body, headers=headers, timeout=WAIT_LIMIT)


def test_sdk_event_in_each_encoding_is_stored(api):
    for encode in (to_structured, to_binary, batch):
        sent = event()
        answer = post(api, encode(sent))
        assert (answer.status_code, answer.json()["accepted"]) == (202, 1), answer.text
        stored = Event.objects.get(event_id=to_dict(sent)["id"])
        assert (stored.source, stored.type) == ("/shop", "material.downloaded")
        assert (stored.user_id, stored.chat_id, stored.data) == ("ann", "c1", DATA)
    # The day the SDK names the content of its binary events, they are covered no more.
    assert "content-type" not in {name.lower() for name in to_binary(event())[0]}
    assert post(api, (to_binary(event())[0], b"<x/>")).status_code == 400
    assert post(api, batch(event(), event(subject="bob"))).json()["accepted"] == 2
    assert set(Event.objects.values_list("user_id", flat=True)) == {"ann", "bob"}
