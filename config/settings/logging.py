"""Configure structured logs on standard error: one JSON object per line, or readable lines on a terminal."""

from __future__ import annotations

import logging
import re
import sys
from contextlib import suppress
from typing import Any

import structlog

from config.celery.schedule import PASSES
from config.environment import environment

_shared: list[structlog.typing.Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]
_renderer = (
    structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer(ensure_ascii=False)
)


class _Straight:
    """A logger that writes a line with one call.

    The `logging` module (two records, a search for the caller, a lock) costs more than the judgement of a touch. The
    log channel writes one line per touch, and the tracing of events writes lines at each commit.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def info(self, entry: dict[str, Any], *, extra: object) -> None:
        with suppress(OSError, ValueError):  # a closed log must not stop a touch
            sys.stderr.write(str(_renderer(self, "info", entry)) + "\n")

    debug = info


_STRAIGHT = ("scheduling.channels.log", "scheduling.tracing")
_through_logging = structlog.stdlib.LoggerFactory()


#: Patterns of secrets by a substring that each one contains. The substring search is cheap.
_SECRETS = {
    "=": re.compile(r"([?&](?:key|token|access_token|secret|sign|signature|password)=)[^&\s\"'\\]+"),
    "/v2/hook/": re.compile(r"(/v2/hook/)[\w-]+"),
    "://": re.compile(r"(://[^/@:\s\"'\\]{0,64}:)[^/@\s\"'\\]{1,200}(?=@)"),
    "earer ": re.compile(r"(earer )[\w.~+/=-]{20,}"),
    "whsec_": re.compile(r"(whsec_)[\w+/=-]+"),
    "SEC": re.compile(r"(SEC)[0-9a-f]{64}"),
    "at_": re.compile(r"(at_)[\w-]{43}"),
}


def _without_secrets(_: Any, __: str, line: str) -> str:
    """Mask secrets in a log line. An error may contain a URL, and the key of a chat robot is part of its URL.

    Lines of `_Straight` are not masked: they contain only ids.
    """
    for mark, secret in _SECRETS.items():
        if mark in line:
            line = secret.sub(r"\1…", line)
    return line


class WithoutTokens(logging.Filter):
    """Mask tokens in URLs that uvicorn logs: of WebSockets, and of callbacks (`/hooks/<channel>/<token>`).

    Drop its debug lines, which contain the frames of chats and take-overs.
    """

    TOKEN = re.compile(r"([?&]token=|/hooks/[^/\s]+/|/admin/invitation/)[^&?\s\"]+")

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(self.TOKEN.sub(r"\1…", each) if isinstance(each, str) else each for each in record.args)
        return record.levelno > logging.DEBUG


class WithoutPasses(logging.Filter):
    """Drop Celery's two log lines for periodic passes, which would be 200,000 a day."""

    def filter(self, record: logging.LogRecord) -> bool:
        task = record.args.get("name") if isinstance(record.args, dict) else None
        return record.levelno > logging.INFO or task not in PASSES


structlog.configure(
    # A line below the level costs nothing, not even its arguments.
    wrapper_class=structlog.make_filtering_bound_logger(environment().django_log_level.lower()),
    processors=[*_shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
    logger_factory=lambda name="": _Straight(name) if name in _STRAIGHT else _through_logging(name),
    cache_logger_on_first_use=True,
)

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "structured": {
            "()": structlog.stdlib.ProcessorFormatter,
            "foreign_pre_chain": _shared,
            "processors": [
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                _renderer,
                _without_secrets,
            ],
        }
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "structured"}},
    "root": {"handlers": ["stderr"], "level": environment().django_log_level},
    "filters": {"without_tokens": {"()": WithoutTokens}, "without_passes": {"()": WithoutPasses}},
    "loggers": {
        "uvicorn.error": {"filters": ["without_tokens"]},
        "uvicorn.access": {"handlers": ["stderr"], "filters": ["without_tokens"], "propagate": False},
        "celery.worker.strategy": {"filters": ["without_passes"]},
        "celery.app.trace": {"filters": ["without_passes"]},
        "aiohttp.access": {"level": "WARNING"},
        "websockets": {"level": "INFO"},  # its debug lines contain what is typed in a take-over
        "django.request": {"level": "ERROR"},
    },
}
