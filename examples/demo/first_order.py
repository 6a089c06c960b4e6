"""Demo scene of a condition and a send window: a welcome after the first order, in the morning of a working day."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

NODE = "insale-first-order"


def first_order(demo: Any, print_line: Any) -> None:
    print_line("\nA welcome after the first order only, inside the send window of the next working day:")
    demo.apply_matrix(NODE)
    for number, wanted in ((1, 1), (2, 0)):
        order = {
            "specversion": "1.0", "id": f"hal-{number}", "source": "/demo-shop", "type": "order.paid",
            "subject": "hal", "time": datetime.now(UTC).isoformat(), "data": {"chat_id": "chat-of-hal"},
        }  # fmt: skip
        (shown,) = (each for each in demo.call("POST", "/api/v1/preview", order)["items"] if each["node"] == NODE)
        receipt = demo.call("POST", "/api/v1/events", order)
        touches = [demo.call("GET", f"/api/v1/touches/{task_id}") for task_id in receipt["touches"]]
        planned = [touch["due_at"] for touch in touches if touch["node"] == NODE]
        print_line(f"  hal    order {number}: {_explain_preview(shown)}")
        if len(planned) != wanted or (planned and planned != [shown["due_at"]]):
            demo.problems.append(f"order {number} of hal should plan {wanted} welcomes as previewed, not {planned}")
        if wanted and [each["step"] for each in shown["steps"]][:2] != ["delay", "at"]:
            demo.problems.append(f"the welcome should wait for its time of day, not {shown['steps']}")


def _explain_preview(shown: dict[str, Any]) -> str:
    if not shown["planned"]:
        verdict = shown["verdict"]
        return f"no welcome, {verdict['rule']}: {verdict['limit']}, observed {verdict['observed']}"
    return " → ".join(f"{each['step']} {each['at'][:16].replace('T', ' ')} UTC" for each in shown["steps"])
