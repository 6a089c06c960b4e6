"""Log a touch and report it as delivered, for demos, dry runs and tests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

import structlog

from scheduling.channels import options
from scheduling.channels.base import Channel, Delivered, Message, Outcome

logger = structlog.get_logger(__name__)


class Log(Channel):
    """The log channel, without config or target. Logs the body only at debug level: it may contain customers' words."""

    kind: ClassVar[str] = "log"
    default_idempotent = True

    def __init__(self, config: Mapping[str, Any], timeout: timedelta) -> None:
        super().__init__(config, timeout)
        options.check_known_keys(config, ())

    @classmethod
    def validate_target(cls, target: Mapping[str, Any]) -> None:
        options.check_known_keys(target, ())

    def target_key(self, message: Message) -> str:
        return self.kind

    async def attempt(self, message: Message) -> Outcome:
        # A pipe that is not read blocks a thread, not the calls of other channels.
        await asyncio.to_thread(_log_message, message)
        return Delivered("logged")


def _log_message(message: Message) -> None:
    description = {
        "task_id": str(message.task_id),
        "delivery_key": str(message.delivery_key),
        "trace_id": message.trace_id.hex if message.trace_id else "",
        "node": message.node,
        "user_id": message.user_id,
        "chat_id": message.chat_id,
        "content_type": message.content_type,
        "length": len(message.body),
    }
    logger.info("Touch logged", action="touch_logged", **description)
    if logger.is_enabled_for(logging.DEBUG):
        logger.debug("Body of the logged touch", action="touch_logged", body=message.body, **description)
