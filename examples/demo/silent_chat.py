"""Demo scene of a silent chat: one guide message, and none for a chat that continues."""

from __future__ import annotations

import time
from typing import Any

THRESHOLD = 3  #: seconds of silence
POLICIES = [
    {"tag": "default", "threshold": "60s", "jitter": "5s"},
    {"tag": "demo", "threshold": f"{THRESHOLD}s", "after": "agent"},
]
TOUCH_TIME_LIMIT = 40.0


def silent_chat(demo: Any, print_line: Any) -> None:
    print_line(f"\nTwo live chats with an agent; fay falls silent, gus goes on writing (guide after {THRESHOLD} s):")
    _ask_and_answer(demo, "fay")
    began_at = time.monotonic()
    touch = None
    while touch is None and time.monotonic() < began_at + TOUCH_TIME_LIMIT:
        _ask_and_answer(demo, "gus")
        touch = next(iter(_touches_of(demo, "fay")), None)
        time.sleep(0.25)
    demo.expect("fay", "the guide message", touch and str(touch["task_id"]), "delivered")
    _ask_and_answer(demo, "gus")
    for who, wanted in (("fay", 1), ("gus", 0)):
        found = len(_touches_of(demo, who))
        print_line(f"  {who:<6} {found} guide message{'s' * (found != 1)}")
        if found != wanted:
            demo.problems.append(f"{who} should get {wanted} guide messages, not {found}")


def _ask_and_answer(demo: Any, who: str) -> None:
    """Post a message of the customer, then one of an agent. The timer runs after the agent's."""
    for side in ("user", "agent"):
        frame = {"user_id": who, "chat_id": f"chat-of-{who}", "from": side, "kind": "message", "tag": "demo"}
        demo.call("POST", f"/api/v1/sessions/live-{who}/activity", frame)


def _touches_of(demo: Any, who: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = demo.call("GET", f"/api/v1/touches?user={who}")["items"]
    return items
