"""Channel `rpa`: deliver a touch through a flow, for platforms without an API for messages to buyers.

Delivered means that the job is stored, once per delivery key, however often the touch is sent. Later retries and the
failed task belong to the job, not to the touch.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from datetime import timedelta
from time import monotonic
from typing import Any, ClassVar

from django.db import connection

from rpa_tasks.jobs.publish import BacklogFull, PublishRequest, Receipt, publish_job
from scheduling import sql
from scheduling.channels import options
from scheduling.channels.base import (
    Channel,
    Delivered,
    InvalidSetting,
    Message,
    Outcome,
    Permanent,
    Transient,
    Unknown,
    thread_pool,
)
from scheduling.error_text import ErrorText as _
from scheduling.errors import InvalidInput

THREADS = 4  #: each with a connection to PostgreSQL while it stores a job
MEMBERS = ("user_id", "chat_id", "node", "content_type", "subject", "body")  #: of the payload, unless configured
PLACEHOLDER = re.compile(rf"{{({'|'.join(MEMBERS)}|delivery_key)}}")


class Rpa(Channel):
    """Store one job per touch.

    Config: `platform`, `task_type`, `shop_id` (if the target has none) and `payload`, in whose texts placeholders such
    as `{body}` and `{user_id}` are replaced. Target: `shop_id`.
    """

    kind: ClassVar[str] = "rpa"
    default_idempotent = True
    at_once = THREADS

    def __init__(self, config: Mapping[str, Any], timeout: timedelta) -> None:
        super().__init__(config, timeout)
        options.check_known_keys(config, ("platform", "task_type", "shop_id", "payload"))
        self.platform = options.read_text(config, "platform")
        self.task_type = options.read_text(config, "task_type")
        self.shop_id = options.read_text(config, "shop_id")
        self.payload = config.get("payload") or {name: f"{{{name}}}" for name in MEMBERS}
        for name in ("platform", "task_type"):
            if not getattr(self, name):
                raise InvalidSetting(name, _("is missing"))
        if not isinstance(self.payload, Mapping):
            raise InvalidSetting("payload", _("must be a mapping"))

    @classmethod
    def validate_target(cls, target: Mapping[str, Any]) -> None:
        options.check_known_keys(target, ("shop_id",))
        options.read_text(target, "shop_id")

    def target_key(self, message: Message) -> str:
        return f"{self.kind}:{self.platform}"

    async def attempt(self, message: Message) -> Outcome:
        """Store the job. A full backlog is a transient error, an invalid shop a permanent one."""
        shop_id = str(message.target.get("shop_id") or self.shop_id)
        request = PublishRequest(
            platform=self.platform,
            shop_id=shop_id,
            task_type=self.task_type,
            payload=_fill_placeholders(self.payload, message),
            touch_key=message.delivery_key,
            source=f"touch {message.task_id}",
        )
        ends_at = monotonic() + self.timeout.total_seconds()
        try:
            async with asyncio.timeout(self.timeout.total_seconds()):
                receipt = await asyncio.get_running_loop().run_in_executor(
                    thread_pool("rpa-jobs", THREADS), _publish_in_thread, request, ends_at
                )
        except InvalidInput as error:
            return Permanent("rpa_refused", str(error)[:500])
        except BacklogFull as error:
            return Transient("rpa_backlog", str(error), retry_after=timedelta(seconds=error.retry_after))
        except (*sql.UNAVAILABLE_ERRORS, TimeoutError) as error:
            return Unknown("database_unavailable", str(error)[:500])
        return Delivered(f"job {receipt.task_id}")


def _publish_in_thread(request: PublishRequest, ends_at: float) -> Receipt:
    left = ends_at - monotonic()
    if left < 0.001:  # PostgreSQL counts milliseconds, and 0 is no limit
        raise TimeoutError
    try:
        with sql.brief_lock_waits(left):  # a thread that outlives its attempt takes the place of another one
            return publish_job(request)
    finally:
        connection.close()  # the thread may not run again for days


def _fill_placeholders(value: Any, message: Message) -> Any:
    if isinstance(value, Mapping):
        return {name: _fill_placeholders(each, message) for name, each in value.items()}
    if isinstance(value, list):
        return [_fill_placeholders(each, message) for each in value]
    if isinstance(value, str):  # in one pass: a text of a customer may look like a placeholder
        return PLACEHOLDER.sub(lambda found: str(getattr(message, found[1])), value)
    return value
