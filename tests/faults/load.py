"""A steady load of events through the real API, sent again until they are accepted, as a careful sender would."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from itertools import count
from typing import Any, Self
from urllib.parse import urlsplit

from tests.support.waiting import WAIT_LIMIT

#: How many of a hundred events come from whom.
CAST = {"ann-{}": 80, "shaky-{}": 6, "bad-{}": 4, "deaf-{}": 5, "stopper-{}": 5}
SLOW_RECEIVERS = 10  #: customers who opted out beforehand
SENDERS = 4
ANSWER_WITHIN = 15.0


@dataclass(frozen=True)
class Accepted:
    event_id: str
    type: str
    user_id: str
    at: float  #: seconds since the epoch
    took: float  #: of the request that was answered 202


@dataclass
class Load:
    """`with Load(…)`: events go in at `rate` a second until the block ends; then every one of them is accepted.

    It pauses while `is_behind`: on a slow machine the backlog would grow as long as a test waits for its end.
    """

    base_url: str
    api_key: str
    prefix: str
    rate: float
    chance: random.Random
    is_behind: Callable[[], bool]
    accepted: list[Accepted] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)  #: answers that no careful sender should get
    given_up: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ending = threading.Event()
        self._turn = threading.Lock()
        self._numbers = count()
        self._begins_at = self._ask_again_at = time.monotonic()
        self._events = self._generate_events()
        self._threads = [threading.Thread(target=self._send_all, daemon=True) for _ in range(SENDERS)]

    def __enter__(self) -> Self:
        self._begins_at = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(WAIT_LIMIT + 2 * ANSWER_WITHIN)
            assert not thread.is_alive(), "events are still sent"  # they would be missing from the count

    def _generate_events(self) -> Iterator[dict[str, Any]]:
        names, weights = list(CAST), list(CAST.values())
        stopped: list[str] = []
        for number in self._numbers:
            name = self.chance.choices(names, weights)[0].format(f"{self.prefix}{number}")
            if name.startswith("deaf"):
                name = f"deaf-{number % SLOW_RECEIVERS}"
            yield self._event(number, "load.step", name)
            if name.startswith("stopper"):
                stopped.append(name)
            if len(stopped) > 2:
                yield self._event(next(self._numbers), "load.stop", stopped.pop(0))

    def _event(self, number: int, kind: str, user_id: str) -> dict[str, Any]:
        return {
            "specversion": "1.0", "id": f"{self.prefix}{number}", "source": "faults", "type": kind,
            "subject": user_id, "data": {"chat_id": f"c{number % 20}"},
        }  # fmt: skip

    def _next(self) -> dict[str, Any]:
        with self._turn:
            self._wait_for_room()
            self._nth = getattr(self, "_nth", -1) + 1
            event = next(self._events)
            nth = self._nth
        self._ending.wait(max(self._begins_at + nth / self.rate - time.monotonic(), 0))
        return event

    def _wait_for_room(self) -> None:
        if (asked_at := time.monotonic()) < self._ask_again_at:
            return
        while not self._ending.is_set() and self.is_behind():
            self._ending.wait(1.0)
        self._begins_at += time.monotonic() - asked_at  # no burst afterwards
        self._ask_again_at = time.monotonic() + 1.0

    def _send_all(self) -> None:
        api_connection = ApiConnection(self.base_url, self.api_key)
        while not self._ending.is_set():
            event = self._next()
            if not self._ending.is_set():
                self._send(api_connection, event)
        api_connection.close()

    def _send(self, api_connection: ApiConnection, event: dict[str, Any]) -> None:
        gives_up_at = time.monotonic() + WAIT_LIMIT
        while time.monotonic() < gives_up_at:
            began = time.monotonic()
            status, body = api_connection.post(event)
            took = time.monotonic() - began
            if status == 202:
                self.accepted.append(Accepted(event["id"], event["type"], event["subject"], time.time(), took))
                return
            if status not in (0, 429, 503):
                self.refusals.append(f"{event['id']}: {status} {body[:300]}")
            time.sleep(0.2)
        self.given_up.append(event["id"])


class ApiConnection:
    """One connection to the API, dialled again where it broke."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.netloc = urlsplit(base_url).netloc
        self.headers = {"Authorization": f"Bearer {api_key}"}
        self.connection: HTTPConnection | None = None

    def post(self, event: dict[str, Any]) -> tuple[int, str]:
        """Status and body; status 0 where no answer came."""
        headers = {**self.headers, "Content-Type": "application/cloudevents+json"}
        try:
            if self.connection is None:
                self.connection = HTTPConnection(self.netloc, timeout=ANSWER_WITHIN)
            self.connection.request("POST", "/api/v1/events", json.dumps(event), headers)
            answer = self.connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        except (OSError, HTTPException) as error:
            self.close()
            return 0, repr(error)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None
