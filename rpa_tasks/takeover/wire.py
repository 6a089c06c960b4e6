"""Messages of a take-over: channels in Redis, their encryption, and the input that an operator may send.

Messages travel by publish and subscribe, which stores nothing. They are encrypted, so that neither a slow log of Redis
nor its connection shows what is typed. Input is a closed list of actions, never a DevTools command.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import Coroutine, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

INPUT_LIMIT = 65_536  #: bytes of one message of an operator
TEXT_LIMIT = 10_000  #: characters of one paste
URL_LIMIT = 2_000
PART_LIMIT = 45_000  #: bytes of a part of a file from an operator; in base64 it fits into one message
FILES_LIMIT = 20  #: files of one file chooser, and downloads that a take-over lists
SIZE_LIMIT = 2**40  #: bytes
NONCE_BYTES = 12
PICTURE, NOTICE = b"P", b"N"  #: first byte of a message to operators

Input = dict[str, Any]


async def run_until_one_ends(*steps: Coroutine[Any, Any, Any]) -> Any:
    """Run all steps at once. Return or raise what the first one that ends does, after the end of the others."""
    tasks = [asyncio.create_task(step) for step in steps]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        # Repeated: `asyncio.wait_for` of Python 3.11 loses a cancellation that arrives together with its result.
        while not all(task.done() for task in tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1)
        await asyncio.gather(*tasks, return_exceptions=True)


class BadInput(ValueError):
    """A message that no page of this product sends. The text of the error has no part of it."""


def to_node_channel(take_over: int) -> str:
    return f"at:takeover:{take_over}:in"


def to_operators_channel(take_over: int) -> str:
    return f"at:takeover:{take_over}:out"


class Sealer:
    """Encrypt and authenticate the messages of one take-over and one direction."""

    def __init__(self, key: bytes, channel: str) -> None:
        self._cipher = AESGCM(key)
        self._channel = channel.encode()

    def seal(self, content: bytes) -> bytes:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, content, self._channel)

    def open(self, sealed: bytes) -> bytes | None:
        """Return the content, or None if the message was not sealed with this key."""
        try:
            return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], self._channel)
        except (InvalidTag, ValueError):
            return None


def parse_input(text: str) -> Input:
    """Return the action with its checked fields only. Raises `BadInput`."""
    if len(text) > INPUT_LIMIT:
        raise BadInput("too long")
    try:
        given = json.loads(text)
        return {"do": given["do"], **ACTIONS[given["do"]].model_validate(given).model_dump()}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise BadInput("not an action") from None


def _whole(least: int, most: int) -> Any:
    return Annotated[int, Field(ge=least, le=most)]


def _number(least: float, most: float) -> Any:
    return Annotated[float, Field(ge=least, le=most, allow_inf_nan=False)]


def _text(most: int) -> Any:
    return Annotated[str, Field(max_length=most)]


def _check_part(data: str) -> str:
    """Check base64, which stays as it is."""
    if len(base64.b64decode(data, validate=True)) > PART_LIMIT:
        raise ValueError("part too long")
    return data


def _check_address(text: str) -> str:
    """Return an address of the web; a name without a scheme gets `https`. Files are no pages."""
    text = text.strip()
    if "://" not in text:
        text = f"https://{text}"
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("not an address of the web")
    return text


def _action(**kinds: Any) -> type[BaseModel]:
    fields: dict[str, Any] = {name: (kind, ...) for name, kind in kinds.items()}
    return create_model("Action", __config__=ConfigDict(strict=True), **fields)


_POINT = {"x": _number(-10_000, 10_000), "y": _number(-10_000, 10_000)}
_MODIFIERS = _whole(0, 15)
ACTIONS: Mapping[str, type[BaseModel]] = {
    "ping": _action(),
    "hello": _action(),
    "ack": _action(number=_whole(0, 2**31)),
    "mouse": _action(
        **_POINT,
        type=Literal["mousePressed", "mouseReleased", "mouseMoved"],
        button=Literal["none", "left", "middle", "right"],
        buttons=_whole(0, 7),
        clicks=_whole(0, 3),
        modifiers=_MODIFIERS,
    ),
    "wheel": _action(**_POINT, dx=_number(-5_000, 5_000), dy=_number(-5_000, 5_000), modifiers=_MODIFIERS),
    "key": _action(
        type=Literal["down", "up"], key=_text(30), code=_text(30), number=_whole(0, 255), modifiers=_MODIFIERS
    ),
    "text": _action(text=_text(TEXT_LIMIT)),
    "go": _action(url=Annotated[_text(URL_LIMIT), AfterValidator(_check_address)]),
    "move": _action(step=Literal[-1, 0, 1]),
    "tab": _action(id=_text(64)),
    "new_tab": _action(),
    "close_tab": _action(id=_text(64)),
    "dialog": _action(id=_whole(1, 2**31), accept=bool, text=_text(1_000)),
    "upload": _action(
        chooser=_whole(1, 2**31),
        token=_text(32),
        number=_whole(0, FILES_LIMIT - 1),
        of=_whole(1, FILES_LIMIT),
        name=_text(255),
        size=_whole(0, SIZE_LIMIT),
        offset=_whole(0, SIZE_LIMIT),
        data=Annotated[str, AfterValidator(_check_part)],
    ),
    "no_upload": _action(chooser=_whole(1, 2**31)),
    "fetch": _action(id=_text(36), offset=_whole(0, SIZE_LIMIT)),
    "fetched": _action(id=_text(36)),
}
#: Actions that `files` carries out.
FILE_ACTIONS = frozenset({"upload", "no_upload", "fetch", "fetched"})
#: Actions of operators who only watch.
WATCHING = frozenset({"ping", "ack"})
