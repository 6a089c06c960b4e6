"""Bounces of mail: over HTTP and from a mail server's pipe."""

import os
import subprocess
import sys
from io import BytesIO, StringIO, TextIOWrapper
from unittest.mock import Mock
from uuid import UUID

import pytest
import requests
from django.core.management import call_command
from django.db import OperationalError, connection

from config.environment import ROOT, environment
from scheduling.models import DeliveryReceipt, DisabledTarget
from scheduling.receipts import read_bounce
from tests.scheduling.api.serving import database_url
from tests.support.tables import each_row

KEY = "01890000-0000-7000-8000-000000000000"


def bounce(key, status="5.1.1", action="failed", address="ann@example.com", headers=False):
    """Return a delivery status notification, with the whole mail or only its headers."""
    returned = f"Message-ID: <{key}@shop.example>\nFrom: shop@example.com\nSubject: hi\n\nhi\n"
    return f"""From: MAILER-DAEMON@mx.example
To: bounces@shop.example
Subject: Undelivered Mail Returned to Sender
Message-ID: <report-1@mx.example>
MIME-Version: 1.0
Content-Type: multipart/report; report-type=delivery-status; boundary="b"

--b
Content-Type: text/plain

I'm sorry.

--b
Content-Type: message/delivery-status

Reporting-MTA: dns; mx.example

Final-Recipient: rfc822; {address}
Action: {action}
Status: {status}
Diagnostic-Code: smtp; 550 5.1.1 <ann@example.com>: Recipient address
 rejected: User unknown

--b
Content-Type: {"text/rfc822-headers" if headers else "message/rfc822"}

{returned}
--b--
""".encode()


@each_row("headers", [False, True])
def test_bounce_names_the_mail_and_the_address(headers):
    found = read_bounce(bounce(KEY, headers=headers))
    assert (found.kind, found.delivery_key, found.address, found.permanent) == (
        "bounced", UUID(KEY), "ann@example.com", True,
    )  # fmt: skip
    assert found.detail.startswith("5.1.1 550 5.1.1 <ann@example.com>: Recipient address rejected")


@each_row("status, permanent", [("5.2.1", True), ("5.2.2", False), ("5.7.1", False), ("4.4.1", False)])
def test_only_a_missing_mailbox_bounces_for_good(status, permanent):
    assert read_bounce(bounce(KEY, status)).permanent is permanent


def test_delay_and_other_mail_report_nothing():
    for content in (
        bounce(KEY, action="delayed"),
        bounce("not-a-key"),
        b"Subject: hi\n\nhi",
        b"",
        b"\xff\xfe\x00" * 100,
        os.urandom(5_000),
        b"Content-Type: multipart/report; boundary=b\n\n--b\nContent-Type: message/delivery-status\n\n\n\n",
    ):
        with pytest.raises(ValueError, match="the mail"):
            read_bounce(content)
    assert read_bounce(bounce(KEY, action="delivered")).kind == "delivered"


def test_complaint_of_a_mail_provider_is_read():
    content = f"""Content-Type: multipart/report; report-type=feedback-report; boundary=b

--b
Content-Type: message/feedback-report

Feedback-Type: abuse
Version: 1

--b
Content-Type: message/rfc822

Message-ID: <{KEY}@shop.example>

hi
--b--
"""
    found = read_bounce(content.encode())
    assert (found.kind, found.delivery_key) == ("complained", UUID(KEY))


def post(api, content):
    headers = {"Authorization": f"Bearer {api.key}", "Content-Type": "message/rfc822"}
    return requests.post(f"{api.address}/api/v1/bounces", data=content, headers=headers, timeout=60)


@pytest.mark.django_db(transaction=True)
def test_bounce_over_http_disables_the_address_once(api, sent):
    assert post(api, bounce(sent, address="eve@example.com")).json()["accepted"] == 1
    assert not DisabledTarget.objects.exists()  # not the customer's address
    DeliveryReceipt.objects.all().delete()
    assert post(api, bounce(sent)).json() == {"accepted": 1, "duplicates": 0, "refused": []}
    assert post(api, bounce(sent)).json() == {"accepted": 0, "duplicates": 1, "refused": []}
    assert DisabledTarget.objects.get().reason.startswith("bounced: 5.1.1")
    assert post(api, bounce(KEY)).json()["refused"][0]["field"] == "delivery_key"
    assert post(api, b"Subject: hi\n\nhi").status_code == 422


@pytest.mark.django_db(transaction=True)
def test_bounce_from_a_pipe_is_recorded_and_rubbish_is_ignored(sent, monkeypatch):
    def read(content):
        """Without a process of its own, which takes seconds to start."""
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(content)))
        call_command("receive_bounce", stdout=(said := StringIO()))
        return said.getvalue().split(":")[0].strip()

    env = {**os.environ, "REDIS_URL": environment().redis, "DATABASE_URL": database_url()}
    command = [sys.executable, "manage.py", "receive_bounce"]
    answer = subprocess.run(command, input=bounce(sent), cwd=ROOT, env=env, capture_output=True)
    assert (answer.returncode, answer.stdout.decode().strip()) == (0, "recorded"), answer
    assert [read(content) for content in (bounce(sent), b"Subject: hi\n\nhi")] == ["known", "ignored"]
    away = Mock(side_effect=OperationalError("PostgreSQL is away"))
    with connection.execute_wrapper(away), pytest.raises(SystemExit) as ended:
        read(bounce(sent))
    assert ended.value.code == os.EX_TEMPFAIL
