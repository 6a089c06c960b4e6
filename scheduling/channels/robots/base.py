"""Share the code of the group robots of WeCom, DingTalk and Feishu, and clip texts to their limits.

The vendors answer most requests with HTTP 200, so the body decides. Code 0 is delivered, a listed code follows the
vendor's table, an unreadable body is unknown. A robot has no idempotency key: a repeat posts twice. Every request
therefore uses its own connection, and a request with a lost answer is never sent again.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from scheduling.channels import options
from scheduling.channels.answers import CodedAnswers
from scheduling.channels.base import Failure, InvalidSetting, Message, Outcome, Permanent, Quota, Transient
from scheduling.channels.http_client import Transport, shared_transport
from scheduling.channels.markup import (
    BadContent,
    Mentions,
    escape_markdown,
    escape_mentions,
    escape_tags,
    split_mentions,
)
from scheduling.channels.ssrf import PrivateHosts, check_url
from scheduling.error_text import ErrorText as _

HEADERS = {"content-type": "application/json; charset=utf-8"}
TEXT, MARKDOWN, CARD = "text", "markdown", "card"


class Robot(CodedAnswers):
    """Base of the robots. Target: `url`, and `secret` if the robot signs.

    Config: `proxy`, `format` (text, markdown or card). With `mentions` a last line such as “@all @zhangsan” notifies
    members.
    """

    kind: ClassVar[str]
    needs_target: ClassVar[bool] = True
    address_key: ClassVar[str] = ""
    quotas: ClassVar[tuple[Quota, ...]]
    target_fields: ClassVar[frozenset[str]] = frozenset({"url", "secret"})
    secret_fields: ClassVar[frozenset[str]] = target_fields | {"proxy"}
    default_idempotent: ClassVar[bool] = False

    hosts: ClassVar[frozenset[str]]  #: the vendor's hosts; others only if allowed as private hosts
    path: ClassVar[str]  #: prefix of a robot's URL path at the vendor

    def __init__(self, config: Mapping[str, Any], timeout: timedelta, *, transport: Transport | None = None) -> None:
        options.check_known_keys(config, {"format", "mentions", "proxy"})
        self._proxy = options.read_proxy(config)
        self.format = options.read_choice(config, "format", (TEXT, MARKDOWN, CARD))
        self._mentions = options.read_flag(config, "mentions")
        self._timeout = options.check_positive(timeout)
        self._transport = transport

    @classmethod
    def validate_target(cls, target: Mapping[str, Any]) -> None:
        """Check that `url` is an address of this vendor's robots.

        Raises:
            InvalidSetting: a field is not accepted.
        """
        options.check_known_keys(target, {"url", "secret"})
        options.read_text(target, "secret")
        private = PrivateHosts.from_settings()
        url = check_url(options.read_url(target), private)
        host = (url.raw_host or "").lower().removesuffix(".")
        if host in cls.hosts:
            if url.scheme != "https" or not url.raw_path.startswith(cls.path):
                raise InvalidSetting(
                    "url", _("a robot's address must start with %(start)s", start=f"https://{host}{cls.path}")
                )
        elif not private.open(url):
            raise InvalidSetting("url", _("the host must be %(host)s", host=" or ".join(sorted(cls.hosts))))

    def target_key(self, message: Message) -> str:
        return options.opaque_key(self.kind, str(message.target.get("url", "")))

    def escape(self, value: str) -> str:
        value = escape_tags(value) if self.format == TEXT else escape_markdown(value)
        return escape_mentions(value) if self._mentions else value

    async def send(self, message: Message, deadline: datetime) -> Outcome:
        """Try once. Return `Unknown` if the vendor's result cannot be read."""
        left = options.time_left(deadline, self._timeout)
        if left <= timedelta(0):
            return Transient("no_time", "the deadline had passed before the request started")
        try:
            self.validate_target(message.target)
            url, document = self.request(message, datetime.now(UTC))
        except BadContent as error:
            return Permanent("bad_content", str(error))
        except ValueError as error:
            return Permanent("bad_target", str(error))
        transport = self._transport or shared_transport()
        try:
            response = await transport.request(
                "POST", url, encode_json(document), HEADERS, timeout=left, repeatable=False, proxy=self._proxy
            )
        except Failure as failure:
            return failure.outcome()
        return self.judge(response)

    def request(self, message: Message, now: datetime) -> tuple[str, dict[str, Any]]:
        """Return URL and JSON document of this message, signed if the target has a secret, clipped to the limits.

        Raises:
            BadContent: a card without the button that the vendor requires.
        """
        raise NotImplementedError

    def split_body(self, message: Message) -> tuple[str, Mentions]:
        """Return the text and the members that it mentions."""
        return split_mentions(message.body) if self._mentions else (message.body, Mentions())


def encode_json(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


ELLIPSIS = "…"
JOINER = "\u200d"
LONGEST_CLUSTER = 32  # code points to drop for a whole character; natural language has no longer clusters


def utf8_size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def clip_text(text: str, limit: int, size: Callable[[str], int] = utf8_size) -> str:
    """Return `text`, or its longest prefix that fits with a final …; "" if even the … does not fit.

    `size` must grow with the text and count at least 1 per character.
    """
    if len(text) <= limit and size(text) <= limit:
        return text
    low, high = 0, min(len(text), limit)
    while low < high:
        middle = (low + high + 1) // 2
        if size(text[:middle] + ELLIPSIS) <= limit:
            low = middle
        else:
            high = middle - 1
    clipped = text[: _cluster_boundary(text, low)] + ELLIPSIS
    return clipped if size(clipped) <= limit else ""


def _cluster_boundary(text: str, end: int) -> int:
    """Return the nearest position up to `end` that splits no character: a family emoji, a flag, a letter with marks."""
    for place in range(end, max(end - LONGEST_CLUSTER, 0), -1):
        if not _is_inside_cluster(text, place):
            return place
    return end


def _is_inside_cluster(text: str, place: int) -> bool:
    if not 0 < place < len(text):
        return False
    before, after = text[place - 1], text[place]
    if JOINER in (before, after) or _extends_cluster(after):
        return True
    return _is_flag_half(before) and _is_flag_half(after) and _flag_halves_before(text, place) % 2 == 1


def _extends_cluster(character: str) -> bool:
    """Return whether a character belongs to the previous one.

    Such are combining marks, variation selectors, skin tones and tag characters.
    """
    return (
        unicodedata.category(character) in {"Mn", "Me", "Mc"}
        or "\U0001f3fb" <= character <= "\U0001f3ff"
        or "\U000e0020" <= character <= "\U000e007f"
    )


def _is_flag_half(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"


def _flag_halves_before(text: str, place: int) -> int:
    start = place
    while start > 0 and place - start < LONGEST_CLUSTER and _is_flag_half(text[start - 1]):
        start -= 1
    return place - start
