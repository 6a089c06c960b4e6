"""Demo scene of a silent chat: one guide message, and none for a chat that continues."""

from __future__ import annotations

import time
from typing import Any

THRESHOLD = 3  #: seconds of silence
POLICIES = [{"tag": "default", "threshold": "60s", "jitter": "5s"}, {"tag": "demo", "threshold": f"{THRESHOLD}s"}]
TOUCH_TIME_LIMIT = 40.0


def silent_chat(demo: Any, print_line: Any) -> None:
    print_line(f"\nTwo live chats; fay falls silent, gus goes on writing (guide message after {THRESHOLD} s):")
    _post_message(demo, "fay")
    began_at = time.monotonic()
    touch = None
    while touch is None and time.monotonic() < began_at + TOUCH_TIME_LIMIT:
        _post_message(demo, "gus")
        touch = next(iter(_touches_of(demo, "fay")), None)
        time.sleep(0.25)
    demo.expect("fay", "the guide message", touch and str(touch["task_id"]), "delivered")
    _post_message(demo, "gus")
    for who, wanted in (("fay", 1), ("gus", 0)):
        found = len(_touches_of(demo, who))
        print_line(f"  {who:<6} {found} guide message{'s' * (found != 1)}")
        if found != wanted:
            demo.problems.append(f"{who} should get {wanted} guide messages, not {found}")


def _post_message(demo: Any, who: str) -> None:
    frame = {"user_id": who, "chat_id": f"chat-of-{who}", "from": "user", "kind": "message", "tag": "demo"}
    demo.call("POST", f"/api/v1/sessions/live-{who}/activity", frame)


def _touches_of(demo: Any, who: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = demo.call("GET", f"/api/v1/touches?user={who}")["items"]
    return items
