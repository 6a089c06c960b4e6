"""The call of all peers: a webhook with the fields, headers and signature of Aftertouch's own.

A peer is given the number of the call alone. It reads no template, customer or event.
"""

from __future__ import annotations

import base64
import json
import logging
import os
from datetime import UTC, datetime
from functools import cache

import httpx
from standardwebhooks.webhooks import Webhook

SECRET = "whsec_" + base64.b64encode(b"known to this benchmark only....").decode()
#: A database of the benchmark's Valkey. Only one peer runs at a time.
BROKER = os.environ["REDIS_URL"].rsplit("/", 1)[0] + "/2"
RECEIVER = "PEER_RECEIVER"  #: the variable with the receiver's URL
SIGNER = Webhook(SECRET)

logging.getLogger("httpx").setLevel(logging.WARNING)  # one line for each call would cost the peers time


def build_call(name: str) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of the call with this `webhook-id`."""
    now = datetime.now(UTC)
    document = {
        "type": "touch.due",
        "timestamp": now.isoformat(timespec="milliseconds"),
        "data": {
            "task_id": name,
            "user_id": f"user-{name}",
            "chat_id": "",
            "node": "guide-0",
            "content_type": "guide-0",
            "body": f"您好 {name}，Aftertouch 的使用指南已经准备好了。",
            "event": {"source": "bench", "id": name, "type": "bench.guide-0", "time": now.isoformat()},
        },
    }
    body = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    headers = {
        "content-type": "application/json; charset=utf-8",
        "webhook-id": name,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": SIGNER.sign(name, now, body),
    }
    return body.encode(), headers


def send_call(name: str) -> None:
    """Send the call with the client that this process keeps.

    Raises:
        HTTPError: the receiver has not accepted it.
    """
    body, headers = build_call(name)
    _client().post(os.environ[RECEIVER], content=body, headers=headers).raise_for_status()


@cache
def _client() -> httpx.Client:
    return httpx.Client(trust_env=False)
