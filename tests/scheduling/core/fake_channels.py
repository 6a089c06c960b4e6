"""A channel scripted by the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

from django.db import connection

from scheduling.channels.base import Channel, Delivered, Message, Outcome, Quota
from scheduling.delivery.presence import PresenceQuestion


@dataclass
class FakeChannelState:
    """The play of one test."""

    play: Callable[[Message], Outcome | Exception] = lambda message: Delivered("heard")
    received: list[Message] = field(default_factory=list)
    on_stage: threading.Event = field(default_factory=threading.Event)  #: a message is being sent
    release_calls: threading.Event = field(default_factory=threading.Event)  #: where the play blocks, until this is set
    blocks: bool = False
    in_transaction: list[bool] = field(default_factory=list)  #: at each call, of the calling thread


class FakeChannel(Channel):
    kind: ClassVar[str] = "fake"
    default_idempotent = True
    fake_channel: ClassVar[FakeChannelState] = FakeChannelState()

    def __init__(self, config: Mapping[str, Any], timeout: timedelta) -> None:
        super().__init__(config, timeout)
        self._name = config["name"]

    @classmethod
    def validate_target(cls, target: Mapping[str, Any]) -> None:
        pass

    def target_key(self, message: Message) -> str:
        return str(self._name)

    async def attempt(self, message: Message) -> Outcome:
        fake_channel = self.fake_channel
        blocks = fake_channel.blocks  # read before the message is visible as received, so that later ones pass
        fake_channel.received.append(message)
        fake_channel.in_transaction.append(connection.in_atomic_block)
        fake_channel.on_stage.set()
        if blocks:
            await asyncio.to_thread(fake_channel.release_calls.wait, 120)
        answer = fake_channel.play(message)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Limited(FakeChannel):
    """The same, with at most two messages an hour for a receiver."""

    kind: ClassVar[str] = "limited"
    quotas = (Quota(2, timedelta(hours=1)),)


class FakePresence:
    """A Presence provider with one answer to all questions: a block, or an error."""

    def __init__(self, answer: str | Exception, *event_types: str) -> None:
        self.answer, self.event_types = answer, frozenset(event_types)
        self.asked: list[str] = []  #: users

    def presence_blocks(self, questions: Sequence[PresenceQuestion]) -> list[str]:
        self.asked += [question.user_id for question in questions]
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer] * len(questions)

    def note_sending(self, questions: Sequence[PresenceQuestion], sent: Sequence[bool]) -> None:
        """Count nothing."""


class Died(BaseException):
    """The process is gone: nothing catches it, nothing is cleaned up."""
