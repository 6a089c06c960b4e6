"""Log a touch and report it as delivered, for demos, dry runs and tests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, ClassVar

import structlog

from scheduling.channels import options
from scheduling.channels.base import Delivered, Message, Outcome, Quota

logger = structlog.get_logger(__name__)


class Log:
    """The log channel, without config or target. Logs the body only at debug level: it may contain customers' words."""

    kind: ClassVar[str] = "log"
    needs_target: ClassVar[bool] = False
    address_key: ClassVar[str] = ""
    quotas: ClassVar[tuple[Quota, ...]] = ()
    secret_fields: ClassVar[frozenset[str]] = frozenset()
    default_idempotent: ClassVar[bool] = True

    def __init__(self, config: Mapping[str, Any], timeout: timedelta) -> None:
        options.check_known_keys(config, ())
        options.check_positive(timeout)

    @classmethod
    def validate_target(cls, target: Mapping[str, Any]) -> None:
        options.check_known_keys(target, ())

    def target_key(self, message: Message) -> str:
        return self.kind

    async def send(self, message: Message, deadline: datetime) -> Outcome:
        # A pipe that is not read blocks a thread, not the calls of other channels.
        await asyncio.to_thread(_log_message, message)
        return Delivered("logged")


def _log_message(message: Message) -> None:
    description = _describe(message)
    logger.info("Touch logged", action="touch_logged", **description)
    if logger.is_enabled_for(logging.DEBUG):
        logger.debug("Body of the logged touch", action="touch_logged", body=message.body, **description)


def _describe(message: Message) -> dict[str, Any]:
    task_id = str(message.task_id)
    return {
        "task_id": task_id,
        "delivery_key": task_id if message.delivery_key is message.task_id else str(message.delivery_key),
        "trace_id": message.trace_id.hex if message.trace_id else "",
        "node": message.node,
        "user_id": message.user_id,
        "chat_id": message.chat_id,
        "content_type": message.content_type,
        "length": len(message.body),
    }
