"""Answer each unanswered message of the demo shop's buyers once.

Payload: {"site": "http://127.0.0.1:8765", "reply": "…", "only": "u1", "login": true}. `only` restricts it to the
messages of that buyer; `only` and `login` are optional. As a channel of touches: "reply": "{body}", "only":
"{user_id}".

Idempotent: the form sends the message's id as its token, and the site accepts a token once. A repeated run adds
nothing, even if the first was killed between the click and the response.
"""

from __future__ import annotations

import re
from typing import Any

from examples.demo_shop.visiting import check_response, is_logged_in, visit
from rpa_tasks.flow_sdk import BusinessError, Flow, SessionExpired

OPEN = "[data-message][data-answered='0']"
IDS = "(messages, only) => messages.filter(m => !only || m.dataset.user === only).map(m => m.dataset.message)"
NEWLINE = re.compile(r"\r\n?")
ANSWERED_ALREADY = 409
REFUSED = 400


def run(flow: Flow) -> dict[str, Any]:
    reply, only = flow.text("reply"), flow.payload.get("only")
    if only is not None:
        only = flow.text("only")
    waiting: list[str] = visit(flow, "/messages").eval_on_selector_all(OPEN, IDS, only)
    answered = 0
    for number, message_id in enumerate(waiting, start=1):
        answered += _answer_message(flow, message_id, reply)
        flow.progress(number / len(waiting), f"{number} of {len(waiting)}")
    return {"answered": answered, "already": len(waiting) - answered}


def _answer_message(flow: Flow, message_id: str, reply: str) -> bool:
    """Answer one message on the page of messages, and return to that page. False: another client or run was faster."""
    page = flow.page
    message = page.locator(f"{OPEN}[data-message='{message_id}']")
    if not message.count():
        return False
    box = message.get_by_label("Your answer")
    box.fill(reply)
    if box.input_value() != NEWLINE.sub("\n", reply):
        raise BusinessError(f"The form takes no answer of {len(reply)} characters.")  # it truncated it silently
    with page.expect_navigation() as navigation:
        message.get_by_role("button", name="Reply").click()
    check_response(navigation.value)
    status = navigation.value.status if navigation.value else 0
    if status == REFUSED:
        raise BusinessError("The site refuses this answer.")
    if not is_logged_in(flow):
        raise SessionExpired(f"{flow.shop_id} was logged out before its answer arrived.")
    if status == ANSWERED_ALREADY:
        visit(flow, "/messages")
    return status != ANSWERED_ALREADY
