"""Updates by clients do not undo the opt-outs of people."""

from datetime import timedelta

import pytest
import requests

from scheduling.channels.email import make_token
from scheduling.models import Customer, CustomerChange
from tests.scheduling.api.serving import cloud_event
from tests.scheduling.core.conftest import pass_time
from tests.scheduling.imports.conftest import import_file, read_refused
from tests.support.second_connection import run_concurrently
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)

ALLOW = {"opted_out": False}
SECOND = timedelta(seconds=1)


def agree(after):
    """A consent that was given `after` the opt-out, or before it."""
    since = Customer.objects.get(user_id="ann").objected_at
    assert since is not None
    return ALLOW | {"consent": {"given_at": (since + after).isoformat(), "source": "checkout"}}


def click_link(api):
    assert requests.post(f"{api.address}/u/{make_token('ann')}", timeout=WAIT_LIMIT).status_code == 200


def complain(api):
    assert api.event(cloud_event(type="complaint.received")).status_code == 202


@pytest.mark.parametrize("opt_out", [click_link, complain])
def test_only_a_later_consent_lifts_a_person_s_own_opt_out(api, opt_out):
    api("PUT", "/customers/ann", {"name": "Ann"})
    opt_out(api)
    since = Customer.objects.get().opted_out_at
    alone = api("PUT", "/customers/ann", ALLOW | {"level": "vip"})
    assert (alone.status_code, alone.json()["ignored"], alone.json()["level"]) == (200, ["opted_out"], "vip")
    batch = {"customers": [{"user_id": "ann", **ALLOW, "level": "normal"}, {"user_id": "bob", **ALLOW}]}
    receipts = api("POST", "/customers", batch).json()["customers"]
    assert [(each["changed"], each["ignored"]) for each in receipts] == [(["level"], ["opted_out"]), ([], [])]
    earlier = api("PUT", "/customers/ann", agree(-SECOND)).json()
    assert (earlier["ignored"], earlier["consent"]) == (["opted_out"], None)
    ann = Customer.objects.get(user_id="ann")
    assert (ann.opted_out, ann.opted_out_at) == (True, since)
    told = api("PUT", "/customers/ann", agree(timedelta(microseconds=1))).json()
    assert (told["ignored"], told["opted_out"], told["opted_out_at"], told["objected_at"]) == ([], False, None, None)
    assert told["consent"]["source"] == "checkout"


@pytest.mark.parametrize("after", [timedelta(microseconds=1), timedelta(minutes=4)], ids=["now", "a clock ahead"])
def test_repeated_consent_does_not_lift_the_next_opt_out(api, after):
    click_link(api)
    consent = agree(after)
    assert not api("PUT", "/customers/ann", consent).json()["opted_out"]
    click_link(api)
    again = api("PUT", "/customers/ann", consent).json()
    assert (again["opted_out"], again["ignored"]) == (True, ["opted_out"])


def test_second_opt_out_outdates_a_consent_between_the_two(api):
    click_link(api)
    pass_time(minutes=2)
    first = Customer.objects.get()
    consent = agree(timedelta(microseconds=1))
    click_link(api)
    assert api("PUT", "/customers/ann", consent).json()["ignored"] == ["opted_out"]
    assert Customer.objects.get().opted_out_at == first.opted_out_at


def test_link_makes_the_opt_out_of_a_client_the_person_s_own(api):
    api("PUT", "/customers/ann", {"opted_out": True})
    click_link(api)
    assert api("PUT", "/customers/ann", ALLOW).json()["ignored"] == ["opted_out"]


def test_history_shows_each_consent_with_time_source_and_actor(api):
    click_link(api)
    objected_at = Customer.objects.get().objected_at
    given = agree(SECOND)["consent"]
    api("PUT", "/customers/ann", ALLOW)
    api("PUT", "/customers/ann", agree(SECOND))
    first, second = CustomerChange.objects.order_by("pk")
    assert (first.actor, first.after["opted_out"], first.after["objected_at"]) == (
        "unsubscribe", True, objected_at and objected_at.isoformat(),
    )  # fmt: skip
    assert (second.actor, second.after) == (
        "api:shop", {"opted_out": False, "objected_at": None, "consent": given},
    )  # fmt: skip


def test_import_keeps_a_person_s_own_opt_out_and_lists_it(api):
    click_link(api)
    row = import_file("user_id,opted_out,level\nann,no,vip\n")
    assert (row.counts["kept"], row.counts["refused"]) == (1, 0)
    ann = Customer.objects.get()
    assert (ann.opted_out, ann.level) == (True, "vip")
    assert [entry[:2] for entry in read_refused(row)] == [(2, "opted_out")]


def test_sync_that_races_with_the_link_loses(api):
    api("PUT", "/customers/ann", {"opted_out": True})
    for _ in range(5):
        run_concurrently(2, lambda number: click_link(api) if number else api("PUT", "/customers/ann", ALLOW))
        assert Customer.objects.get().opted_out
