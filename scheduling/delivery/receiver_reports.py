"""Keep what each process knows of its receivers in Redis for a short time, for the back office and the API.

A process reports the receivers that it holds deliveries for, that rest, or that it gave instants ahead.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable
from typing import Any

import structlog
from django.conf import settings

from scheduling.delivery.lanes import LaneLoad, ReceiverLanes
from scheduling.redis_client import RedisError, connect_once

log = structlog.get_logger(__name__)

PROCESSES = "at:receivers"  #: set of the processes that report; each has a key of its own
INTERVAL = 2.0  #: seconds between reports
REPORT_LIFETIME = 10.0  #: seconds


def report_lanes(lanes: ReceiverLanes) -> None:
    """Report the lanes of this process until it ends. A process without busy lanes writes nothing."""
    name, reported = f"{socket.gethostname()}:{os.getpid()}", False
    while True:
        time.sleep(INTERVAL)
        found = lanes.list_busy()
        try:
            if found or reported:
                send_lane_report(name, found)
            reported = bool(found)
        except RedisError as error:
            log.info("receivers_not_reported", error=str(error))


def send_lane_report(process: str, found: Iterable[LaneLoad]) -> None:
    """Replace the report of a process. Raises `RedisError`."""
    with connect_once(settings.REDIS_URL).pipeline(transaction=False) as pipe:
        pipe.sadd(PROCESSES, process)
        pipe.set(f"{PROCESSES}:{process}", json.dumps(list(found)), px=int(REPORT_LIFETIME * 1000))
        pipe.execute()


def read_receiver_loads() -> dict[str, LaneLoad]:
    """Return the sum of the reports of the last `REPORT_LIFETIME`, by receiver. Raises `RedisError`."""
    client = connect_once(settings.REDIS_URL)
    members: Any = client.smembers(PROCESSES)
    processes = sorted(each.decode() for each in members)
    if not processes:
        return {}
    texts: Any = client.mget([f"{PROCESSES}:{each}" for each in processes])
    if gone := [each for each, text in zip(processes, texts, strict=True) if text is None]:
        client.srem(PROCESSES, *gone)
    loads: dict[str, LaneLoad] = {}
    for own in (LaneLoad(*each) for text in texts if text for each in json.loads(text)):
        known = loads.get(own.receiver)
        loads[own.receiver] = _add_loads(known, own) if known else own
    return loads


def _add_loads(known: LaneLoad, own: LaneLoad) -> LaneLoad:
    return known._replace(
        chat_id=known.chat_id or own.chat_id,
        in_flight=known.in_flight + own.in_flight,
        held=known.held + own.held,
        rate=known.rate + own.rate,
        rest=max(known.rest, own.rest),
    )
