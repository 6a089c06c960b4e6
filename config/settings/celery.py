"""Celery settings for `config.celery.application`. A comment gives the reason for each value that differs from the
default.
"""

from __future__ import annotations

from typing import Any

from config.celery.queues import declared_queues
from config.environment import environment
from config.settings.connections import build_broker
from scheduling.server_addresses import is_rabbitmq

_env = environment()

CELERY_BROKER_URL, CELERY_BROKER_USE_SSL = build_broker(_env.broker)
_quorum = _env.aftertouch_rabbitmq_quorum and is_rabbitmq(CELERY_BROKER_URL)
CELERY_TASK_QUEUES = declared_queues(CELERY_BROKER_URL, quorum=_quorum)
CELERY_TASK_DEFAULT_QUEUE = CELERY_TASK_DEFAULT_EXCHANGE = CELERY_TASK_DEFAULT_ROUTING_KEY = "ticks"
CELERY_WORKER_CONSUMER = "config.celery.guards:DeadLetterConsumer"
CELERY_TIMEZONE = _env.aftertouch_time_zone
CELERY_TASK_SERIALIZER = "json"
CELERY_ACCEPT_CONTENT = ["json"]
# Outcomes are rows. A result backend would only add round trips.
CELERY_TASK_IGNORE_RESULT = True
CELERY_RESULT_BACKEND = None
# Otherwise beat adds a task that deletes results at 04:00.
CELERY_RESULT_EXPIRES = None
# A message is only a wake-up. The row's lease has the role of a late acknowledgement.
CELERY_TASK_ACKS_LATE = False
CELERY_WORKER_PREFETCH_MULTIPLIER = 2
CELERY_WORKER_AUTOSCALER = "config.celery.autoscaler:PoolScaler"
# On a loaded machine, which is when a pool grows, a process needs more than four seconds to start.
CELERY_WORKER_PROC_ALIVE_TIMEOUT = 30
CELERY_TASK_TIME_LIMIT = None
CELERY_WORKER_CANCEL_LONG_RUNNING_TASKS_ON_CONNECTION_LOSS = False
CELERY_WORKER_SOFT_SHUTDOWN_TIMEOUT = 25
CELERY_WORKER_ENABLE_SOFT_SHUTDOWN_ON_IDLE = False
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_WORKER_SEND_TASK_EVENTS = True
CELERY_TASK_CREATE_MISSING_QUEUES = True
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None
# A demoted primary answers READONLY, which is a channel error: reconnect instead of exit.
CELERY_BROKER_CHANNEL_ERROR_RETRY = True
CELERY_BROKER_CONNECTION_TIMEOUT = 2
CELERY_BROKER_POOL_ACQUIRE_TIMEOUT = 2
# A periodic pass replaces a lost wake-up. A failed publish must not delay a request.
CELERY_TASK_PUBLISH_RETRY = False
CELERY_BEAT_SCHEDULER = "config.celery.beat_scheduler:LeaderScheduler"
CELERY_BEAT_SYNC_EVERY = 1
CELERY_BEAT_MAX_LOOP_INTERVAL = 1

CELERY_BROKER_TRANSPORT_OPTIONS: dict[str, Any] = {"confirm_publish": True}
if not is_rabbitmq(CELERY_BROKER_URL):
    _limits = {"socket_timeout": 10, "socket_connect_timeout": 2, "socket_keepalive": True}
    CELERY_BROKER_TRANSPORT_OPTIONS = {
        # A touch is unacknowledged for the horizon plus the batch deadline at most. Passes may run twice.
        "visibility_timeout": 300,
        "unacked_restore_interval": 5,
        "unacked_restore_throttle": 1,
        "queue_order_strategy": "priority",
        "global_keyprefix": "mq:",
        **_limits,
        "health_check_interval": 10,
        "body_encoding": "utf-8",
    }
    if CELERY_BROKER_URL.startswith("sentinel"):
        CELERY_BROKER_TRANSPORT_OPTIONS |= {
            "master_name": _env.aftertouch_sentinel_master,
            "sentinel_kwargs": {**_limits, **_env.sentinel_options},
        }
if _quorum:
    CELERY_TASK_CREATE_MISSING_QUEUE_TYPE = "quorum"
    # On other queues a worker fetches one more message for each delayed one. Quorum queues have a fixed prefetch. It
    # must exceed the number of messages due within the horizon, or delayed messages would block due ones.
    CELERY_WORKER_PREFETCH_MULTIPLIER = 5_000

# Celery would close the database connection around each task, and a login costs more than a batch. Tasks check and
# renew connections as requests do (see `config.celery.guards.SafeTask`).
CELERY_DB_REUSE_MAX = 10**9
