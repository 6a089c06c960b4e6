"""The Celery application and the guards it runs with. Entry points import it before anything publishes."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import structlog
from celery import Celery
from celery.signals import (
    celeryd_after_setup,
    setup_logging,
    worker_process_init,
    worker_process_shutdown,
    worker_ready,
    worker_shutdown,
    worker_shutting_down,
)

from config.celery import guards, metrics  # noqa: F401  (connects to signals)
from config.celery.queues import CORE_QUEUES

log = structlog.get_logger(__name__)


LOGINS = ("--basic-auth", "--basic_auth", "--auth-provider", "--auth_provider", "--conf")
VARIABLES = ("FLOWER_BASIC_AUTH", "FLOWER_AUTH_PROVIDER", "FLOWER_CONF")


def insist(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Ends the process where it is to be a Flower with neither a login nor a file of settings that may name one."""
    program = Path(words[0])
    if "flower" not in words[1:] or "celery" not in (program.name, program.parent.name):
        return
    if any(word.startswith(LOGINS) for word in words) or any(environ.get(name) for name in VARIABLES):
        require_login_for_monitoring()
        return
    sys.exit("Flower needs a login: set FLOWER_BASIC_AUTH=user:password")


def require_login_for_monitoring() -> None:
    """Flower serves these two pages without its login, and the first names all workers and tasks."""
    from flower.views.monitor import Healthcheck, Metrics  # type: ignore[import-untyped,unused-ignore]
    from tornado.web import authenticated

    for view in (Metrics, Healthcheck):
        view.get = authenticated(view.get)


# Like `manage.py`, for `celery -A config inspect` beside `make run`: a worker accepts no request from outside.
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings.local")


insist(sys.argv, os.environ)
guards.install()


class Application(Celery):
    @cached_property
    def Worker(self) -> Any:
        return self.subclass_with_self("config.celery.autoscaler:Worker")


app = Application("aftertouch", task_cls="config.celery.guards:SafeTask")
app.config_from_object("django.conf:settings", namespace="CELERY")
# What a thread publishes goes to the same broker as what the main thread publishes.
app.set_default()
app.autodiscover_tasks()


@setup_logging.connect
def keep_our_logging(**_: Any) -> None:
    """Django's LOGGING holds for workers too."""


@celeryd_after_setup.connect
def refuse_mixed_work(sender: str, instance: Any, conf: Any, **_: Any) -> None:
    """Runs of minutes beside touches of milliseconds need more processes than runs can take."""
    from django.conf import settings

    names = set(instance.app.amqp.queues.consume_from)
    both = names & set(CORE_QUEUES) and names - set(CORE_QUEUES)
    if both and instance.concurrency <= settings.AFTERTOUCH_RPA_SLOTS:
        sys.exit(  # no exception: Celery only logs those that a signal's receiver raises
            f"this worker consumes touches and RPA jobs, so its concurrency ({instance.concurrency}) must exceed "
            f"AFTERTOUCH_RPA_SLOTS ({settings.AFTERTOUCH_RPA_SLOTS})"
        )


@celeryd_after_setup.connect
def insist_on_isolation(sender: str, instance: Any, conf: Any, **_: Any) -> None:
    """An execution worker confines what it runs, or says that it does not. It holds no keys, so it does no other work
    where it is one by its role."""
    from django.conf import settings

    from rpa_tasks import isolation

    names = set(instance.app.amqp.queues.consume_from)
    if settings.AFTERTOUCH_ROLE == "execution" and names & set(CORE_QUEUES):
        sys.exit(
            f"AFTERTOUCH_ROLE: execution has no keys and cannot consume {', '.join(sorted(names & set(CORE_QUEUES)))}"
        )
    if names - set(CORE_QUEUES) and (complaint := isolation.complaint()):
        if not isolation.may_start():
            sys.exit(f"this worker runs commands of flows. {complaint}; set it to none to run them without isolation")
        log.warning("commands_not_isolated", detail=complaint)


@worker_process_init.connect
def keep_what_is_loaded(**_: Any) -> None:
    """Modules and settings live as long as the process. Walked at every full collection of garbage, they cost a burst
    a few per cent of its time."""
    gc.freeze()


@worker_process_shutdown.connect
def finish_sending(**_: Any) -> None:
    """A child that leaves first settles what it has sent; the rest comes back by its leases."""
    from scheduling.delivery.pipeline import sender
    from scheduling.delivery.sender import BATCH_DEADLINE

    if sender.cache_info().currsize:
        sender().finish(BATCH_DEADLINE.total_seconds())


@celeryd_after_setup.connect
def consume_the_homes_queues(sender: str, instance: Any, conf: Any, **_: Any) -> None:
    """What concerns shops whose browser profiles lie on this node comes to this node."""
    from django.conf import settings

    from rpa_tasks.jobs.wakeups import home_queue

    queues, node = instance.app.amqp.queues, settings.AFTERTOUCH_NODE
    if served := [name for name in queues.consume_from if name not in CORE_QUEUES]:
        for name in [home_queue(node, each) for each in served]:
            queues.select_add(queues.new_missing(name))  # as whoever publishes to it would declare it


@worker_ready.connect
def keep_browsers(sender: Any, **_: Any) -> None:
    """An execution worker brings its node's maintainer along."""
    queues = [name for name in sender.app.amqp.queues.consume_from if name not in CORE_QUEUES]
    if queues:
        from rpa_tasks.maintainer import process

        worker = sender.controller
        process.start(queues, worker.max_concurrency or worker.concurrency)


@worker_shutting_down.connect
def begin_no_more(**_: Any) -> None:
    """Children see it before their next job."""
    from rpa_tasks.worker.node import stopping

    stopping.set()


@worker_shutdown.connect
def let_go_of_browsers(**_: Any) -> None:
    from rpa_tasks.maintainer import process

    process.stop()
