"""Structured logs on standard error, one JSON object a line (a readable line on a terminal)."""

from __future__ import annotations

import sys

import structlog

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

structlog.configure(
    # What the level leaves out costs nothing, not even its arguments.
    wrapper_class=structlog.make_filtering_bound_logger(environment().django_log_level.lower()),
    processors=[*_shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
    logger_factory=structlog.stdlib.LoggerFactory(),
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
            ],
        }
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "structured"}},
    "root": {"handlers": ["stderr"], "level": environment().django_log_level},
    "loggers": {"aiohttp.access": {"level": "WARNING"}, "django.request": {"level": "ERROR"}},
}
