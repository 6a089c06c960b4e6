"""The only file that talks to Redis about live sessions: scripts and commands in pipelines, and the expiry of other
people's keys. Raises `StoreAway` for whatever kept the server from answering."""

from __future__ import annotations

import hashlib
import time
from binascii import crc32
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis.client import Pipeline, PubSub
from redis.exceptions import (
    ClusterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ResponseError,
    TryAgainError,
)

from scheduling import redis_client

_FOLDER = Path(__file__).resolve().parent.parent / "lua"
_PRELUDE = (_FOLDER / "prelude.lua").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Script:
    name: str
    text: str = field(init=False, repr=False)
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        text = _PRELUDE + (_FOLDER / f"{self.name}.lua").read_text(encoding="utf-8")
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "digest", hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


NOTE_ACTIVITY = Script("note_activity")
NOTE_PRESENCE = Script("note_presence")
PEEK_SILENT = Script("peek_silent")
CLAIM_SILENT = Script("claim_silent")
CONFIRM = Script("confirm")
RELEASE = Script("release")
STILL_SILENT = Script("still_silent")
NOTE_EXPIRED = Script("note_expired")
TALLY = Script("tally")
FORGET_PAUSES = Script("forget_pauses")


NO_POLICIES = "NOPOLICIES"
#: What a server answers that is there and takes nothing for now: it loads, is full, is no primary any more …
TAKES_NOTHING = (redis.ConnectionError, redis.ReadOnlyError, OutOfMemoryError, TryAgainError, ClusterDownError)
TAKES_NOTHING_CODES = {"MISCONF", "NOREPLICAS", "BUSY"}  #: … cannot write its disk, misses its replicas, runs a script

Call = tuple[Script, Sequence[str], Sequence[Any]]  #: a script with its keys and its arguments


class StoreAway(Exception):
    """The live sessions cannot be reached."""


class NotAllowed(Exception):
    """The Redis user may not do it."""


class NoPolicies(Exception):
    """The server has lost its policies: these calls of the batch did nothing."""

    def __init__(self, undone: list[int], answers: list[Any]) -> None:
        super().__init__("the server has no silence policies")
        self.undone = undone
        self.answers = answers


class Server:
    def __init__(self, url: str) -> None:
        self.client = redis_client.connect(url)

    def run(self, calls: Sequence[Call], clock_offset: int = 0) -> list[Any]:
        """All in one pipeline. A script that the server does not know has done nothing, and is sent again in full.
        Raises `NoPolicies` where some found none."""
        answers = self._send([("EVALSHA", call[0].digest, call) for call in calls], clock_offset)
        unknown = [number for number, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            anew = self._send([("EVAL", calls[number][0].text, calls[number]) for number in unknown], clock_offset)
            for number, answer in zip(unknown, anew, strict=True):
                answers[number] = answer
        undone = [number for number, answer in enumerate(answers) if _lacks_policies(answer)]
        _raise_first([answer for number, answer in enumerate(answers) if number not in undone])
        if undone:
            raise NoPolicies(undone, answers)
        return answers

    def _send(self, calls: Sequence[tuple[str, str, Call]], clock_offset: int) -> list[Any]:
        def fill(pipe: Pipeline) -> None:
            for verb, script, (_, names, words) in calls:
                pipe.execute_command(verb, script, len(names), *names, clock_offset, *words)  # type: ignore[no-untyped-call]

        return self._execute(fill)

    def ask(self, fill: Callable[[Pipeline], object]) -> list[Any]:
        """The answers to the commands that `fill` writes into a pipeline."""
        answers = self._execute(fill)
        _raise_first(answers)
        return answers

    def _execute(self, fill: Callable[[Pipeline], object]) -> list[Any]:
        with away(), self.client.pipeline(transaction=False) as pipe:
            fill(pipe)
            return pipe.execute(raise_on_error=False)

    # --- a gateway's keys -----------------------------------------------------------------------------------------

    def keyspace_events(self) -> str | None:
        """Which events the server tells, None where it does not say."""
        try:
            with away():
                found = self.client.config_get("notify-keyspace-events")
        except ResponseError:
            return None
        return str(next((text(value) for value in found.values()), ""))

    @contextmanager
    def expiries(self) -> Iterator[Ear]:
        """Hear of keys that expire."""
        with away(), closing(self.client.pubsub()) as line:  # type: ignore[no-untyped-call]
            database = self.client.connection_pool.connection_kwargs.get("db") or 0
            channel = f"__keyevent@{database}__:expired"
            try:
                line.subscribe(channel)
                ear = Ear(line)
            except NoPermissionError as error:
                raise NotAllowed(f"SUBSCRIBE {channel}") from error
            yield ear

    def hears_expiry(self, key: str, within: float) -> bool | None:
        """Whether the expiry of `key`, which is written for that, is heard. None where it may not be written."""
        with self.expiries() as ear, away():
            try:
                self.client.set(key, "1", px=1)
            except NoPermissionError:
                return None
            ends_at = time.monotonic() + within
            while time.monotonic() < ends_at:
                self.client.get(key)  # to look at it makes the server notice
                if ear.key(0.05) == key:
                    return True
        return False


class Ear:
    """Hears from a server that also answers when it is asked whether it is there: a line may go dead without a sign."""

    ASKED_EVERY, DEAD_AFTER = 5.0, 15.0  # seconds

    def __init__(self, line: PubSub) -> None:
        self._line = line
        self._asked_at = self._heard_at = time.monotonic()
        self.key(5.0)  # what it says first is that we are heard

    def key(self, timeout: float) -> str | None:
        """The next key that expired, None where there was none for so many seconds. Raises `StoreAway`."""
        with away():
            now = time.monotonic()
            if now - self._asked_at > self.ASKED_EVERY:
                self._asked_at = now
                self._line.ping()
            message = self._line.get_message(timeout=timeout)
        if message:
            self._heard_at = now
        elif now - self._heard_at > self.DEAD_AFTER:
            raise StoreAway("the line is dead")
        return text(message["data"]) if message and message["type"] == "message" else None


@contextmanager
def away() -> Iterator[None]:
    try:
        yield
    except (redis.RedisError, OSError) as error:
        if isinstance(error, (redis.TimeoutError, OSError)) or _takes_nothing(error):
            raise StoreAway(str(error)) from error
        raise


def _raise_first(answers: Sequence[Any]) -> None:
    """A server that takes nothing for now is as good as away; anything else is a fault of ours."""
    for answer in answers:
        if _takes_nothing(answer):
            raise StoreAway(str(answer)) from answer
        if isinstance(answer, Exception):
            raise answer


def _takes_nothing(answer: Any) -> bool:
    return isinstance(answer, TAKES_NOTHING) or (
        isinstance(answer, ResponseError) and str(answer).partition(" ")[0] in TAKES_NOTHING_CODES
    )


def _lacks_policies(answer: Any) -> bool:
    return isinstance(answer, ResponseError) and NO_POLICIES in str(answer)


def text(raw: Any) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)


SHARDS = 16


def shard_of(text: str) -> int:
    return crc32(text.encode()) % SHARDS


def _names(suffix: str, kind: str = "s", colon: str = ":") -> tuple[str, ...]:
    return tuple(f"{{at:{kind}{shard:02}}}{colon}{suffix}" for shard in range(SHARDS))


DUE = _names("due")
INFLIGHT = _names("inflight")
POLICIES = _names("policies")
ACTIVE = _names("active")
PAUSED = _names("paused")
COUNTS = _names("counts")
SIGNS = _names("signs")
SESSION = _names("s:")  #: and the session's id
PRESENCE = _names("", "u")  #: and the user's id: the session of their last frame
WROTE = _names("", "u", "w:")  #: and the user's id: when they last wrote a message, ms
WATCHERS = "{at:watch}"  #: a hash: what each watcher says of itself
SILENCES = "{at:watch}:silences"  #: a hash: how many silences of each tag were handed in
