"""Ids of customers that a bug sends for many people, or that look like another one, are refused at every entrance."""

import pytest
from django.urls import reverse

from scheduling.api.customers import NamedCustomerIn
from scheduling.api.events import parse_event
from scheduling.customers.csv_files import ImportedCustomer
from scheduling.errors import InvalidInput
from scheduling.ids import find_user_id_problem, reveal_odd_characters
from scheduling.models import Customer
from sessions import tokens
from sessions.frames import Frame
from tests.support.tables import each_row

REFUSED = {
    "undefined": "missing id", "null": "missing id", "NULL": "missing id", "[object Object]": "missing id",
    "None": "missing id", "NaN": "missing id", "{{ user.id }}": "missing id", "${userId}": "missing id",
    "{user_id}": "missing id", "%s": "missing id", "<nil>": "missing id",
    "ann ": "space", " ann": "space", "ann\u3000": "space", "ann\u00a0": "space", "a\u00a0nn": "U+00A0",
    "ann\u200b": "U+200B", "\ufeffann": "U+FEFF", "a\u00adnn": "U+00AD", "ann\u2060": "U+2060", "a\u202enn": "U+202E",
    "\u3164": "U+3164", "a\ufe0fnn": "U+FE0F", "a\u200dnn": "U+200D", "ann\u200d": "U+200D",
    "ann\U000e0041": "U+E0041", "a\u2028nn": "U+2028",
}  # fmt: skip
ACCEPTED = [
    "ann", "nan", "none", "Null-1", "undefined-7", "张伟", "Ann Lee", "a:b/c@d", "o6_bmjrPTlm6_2sgVt7hMZOPfL2M", "0",
    "-1", "{550e8400-e29b-41d4-a716-446655440000}", "😀", "用户👩‍👧", "❤️", "José", "José",
]  # fmt: skip


def test_ids_that_many_share_are_refused_with_the_reason():
    found = {text: find_user_id_problem(text) for text in REFUSED}
    assert {text: said for text, said in found.items() if REFUSED[text] not in said} == {}
    assert {text: find_user_id_problem(text) for text in ACCEPTED} == dict.fromkeys(ACCEPTED, "")


def send_event(user_id):
    raw = {"specversion": "1.0", "id": "1", "source": "s", "type": "order.paid", "subject": user_id}
    parse_event(raw)


def import_customer(user_id):
    ImportedCustomer(user_id=user_id)


def send_frame(user_id):
    Frame("s1", user_id)


def issue_token(user_id):
    tokens.Admission("s1", user_id, "", "", "user").frame("ping")


def store_customer(user_id):
    NamedCustomerIn(user_id=user_id)


@each_row("enter", [send_event, import_customer, send_frame, issue_token, store_customer])
def test_every_entrance_refuses_them_and_names_the_field(enter):
    for text in REFUSED:
        with pytest.raises((InvalidInput, ValueError)) as error:
            enter(text)
        if isinstance(error.value, InvalidInput):
            assert {each.field for each in error.value.errors} <= {"subject", "user_id"}
    for text in ACCEPTED:
        enter(text)


@pytest.mark.django_db
def test_pages_show_odd_characters_of_stored_ids(admin_client):
    row = Customer.objects.create(user_id="ann\u200b ")
    assert reveal_odd_characters(row.user_id) == "ann⟨U+200B⟩⟨U+0020⟩"
    for page in (
        reverse("admin:scheduling_customer_changelist"),
        reverse("admin:scheduling_customer_change", args=[row.pk]),
    ):
        assert "ann⟨U+200B⟩⟨U+0020⟩" in admin_client.get(page).content.decode()
