"""Judge the JSON answers of vendors, which report refusals as codes in answers of HTTP 200."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import Any, ClassVar

from scheduling.channels.base import Delivered, Outcome, Permanent, Transient, Unknown
from scheduling.channels.http_client import Response, excerpt, judge_status, parse_retry_after

TOKEN_EXPIRED = "token_expired"  # noqa: S105  a reason, not a secret
LONGEST_VENDOR_ID = 120  # characters
Code = int | str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A vendor's code: its meaning in Chinese for operators, and its effect. Without a flag a retry cannot help."""

    meaning: str
    retry_after: timedelta | None = None  #: a later attempt can help
    gone: bool = False  #: the receiver no longer exists: send nothing more there
    stale_token: bool = False  #: the access token is no longer valid
    unclear: bool = False  #: the vendor does not know itself whether it sent the message

    def outcome(self, code: Code, said: str, response: Response) -> Outcome:
        reason = f"vendor_{code}"
        detail = f"{self.meaning}（{code}：{said}）" if said else f"{self.meaning}（{code}）"
        if self.stale_token:
            return Transient(TOKEN_EXPIRED, detail, self.retry_after, response.status)
        if self.unclear:
            return Unknown(reason, detail)
        if self.retry_after is None:
            return Permanent(reason, detail, response.status, disable_target=self.gone)
        return Transient(reason, detail, parse_retry_after(response) or self.retry_after, response.status)


class CodedAnswers:
    """The base of channels whose vendor answers with codes. Code 0 is delivered, a listed code follows the table.

    An unreadable answer is unknown, and so is an unlisted code with a status of 500 or more. Paths lead into the
    answer: `Response.SendStatusSet.0.Code`.
    """

    #: Paths of the result code and of its text; the first present one counts.
    code_fields: ClassVar[tuple[str, ...]] = ("errcode",)
    text_fields: ClassVar[tuple[str, ...]] = ("errmsg",)
    id_field: str = ""  #: path of the message's id, for vendors whose receipts name it
    accepted: ClassVar[Code] = 0
    refusals: ClassVar[Mapping[Any, Refusal]]

    def judge(self, response: Response) -> Outcome:
        """Return the outcome of the vendor's response."""
        answer = parse_answer(response) or {}
        code = self.find_code(answer)
        if code is None:
            by_status = judge_status(response, repeatable=False)
            return Unknown("garbled", response.excerpt) if isinstance(by_status, Delivered) else by_status
        if code == self.accepted:
            return Delivered(response.excerpt, response.status, read_vendor_id(answer, self.id_field))
        said = excerpt(next((str(found) for name in self.text_fields if (found := read_path(answer, name))), ""))
        refusal = self.refusal(code, said)
        if refusal is not None:
            return refusal.outcome(code, said, response)
        detail = excerpt(f"未知的返回码（{code}：{said}）")
        if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            # The vendor failed on its own side, maybe after it had accepted the message.
            return Unknown("vendor_other", detail)
        # An unlisted code is a refusal too. The retry schedule determines whether a retry helps.
        return Transient("vendor_other", detail, parse_retry_after(response), response.status)

    def find_code(self, answer: Mapping[str, Any]) -> Code | None:
        """Return the first present code of the type of `accepted`."""
        for name in self.code_fields:
            value = read_path(answer, name)
            if isinstance(value, type(self.accepted)) and not isinstance(value, bool):
                return value
        return None

    def refusal(self, code: Any, said: str) -> Refusal | None:
        return self.refusals.get(code)


def parse_answer(response: Response) -> Mapping[str, Any] | None:
    """Return the JSON object of a complete response, or None if the body is something else or was cut."""
    try:
        answer = json.loads(response.body)
    except (ValueError, RecursionError):
        return None
    return answer if response.complete and isinstance(answer, dict) else None


def read_vendor_id(answer: Mapping[str, Any], path: str) -> str:
    """Return the message's id of an answer, or "" if it has no usable one."""
    value = read_path(answer, path) if path else None
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    return text if len(text) <= LONGEST_VENDOR_ID and text.isprintable() else ""


def read_path(answer: Any, path: str) -> Any:
    """Return the value under a path of names and numbers, or None."""
    for step in path.split("."):
        if isinstance(answer, dict):
            answer = answer.get(step)
        elif isinstance(answer, list) and step.isascii() and step.isdigit() and int(step) < len(answer):
            answer = answer[int(step)]
        else:
            return None
    return answer
