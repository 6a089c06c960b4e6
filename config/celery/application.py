"""Define the Celery application and its startup checks. Entry points import it before they publish."""

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

from config.celery import guards, metrics  # noqa: F401  (metrics connects to signals)
from config.environment import ROOT
from config.local.endpoints import adopt_stack_settings
from scheduling.queue_names import CORE_QUEUES

log = structlog.get_logger(__name__)


LOGIN_OPTIONS = ("--basic-auth", "--basic_auth", "--auth-provider", "--auth_provider", "--conf")
LOGIN_VARIABLES = ("FLOWER_BASIC_AUTH", "FLOWER_AUTH_PROVIDER", "FLOWER_CONF")


def require_flower_login(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Exit if this process is a Flower without a login and without a configuration file that may name one."""
    program = Path(words[0])
    if "flower" not in words[1:] or "celery" not in (program.name, program.parent.name):
        return
    if any(word.startswith(LOGIN_OPTIONS) for word in words) or any(environ.get(name) for name in LOGIN_VARIABLES):
        require_login_for_monitoring()
        return
    sys.exit("Flower needs a login: set FLOWER_BASIC_AUTH=user:password")


def require_login_for_monitoring() -> None:
    """Require the login on two pages that Flower serves without it. The first lists all workers and tasks."""
    from flower.views.monitor import Healthcheck, Metrics  # type: ignore[import-untyped,unused-ignore]
    from tornado.web import authenticated

    for view in (Metrics, Healthcheck):
        view.get = authenticated(view.get)


# `celery -A config inspect` beside `make run` uses its settings. The default is production: a worker without the
# variable must not run with the published local key.
adopt_stack_settings(Path(os.environ.get("AFTERTOUCH_STATE_DIR") or ROOT / ".state"), os.environ)
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings.production")
# Celery runs Django's checks and drops their results. They import all pages and the API: a second of processor time.
os.environ.setdefault("CELERY_SKIP_CHECKS", "1")


require_flower_login(sys.argv, os.environ)
guards.install_guards()


class Application(Celery):
    @cached_property
    def Worker(self) -> Any:
        return self.subclass_with_self("config.celery.autoscaler:ScalingWorker")


app = Application("aftertouch", amqp="config.celery.queues:BrokerQueues", task_cls="config.celery.guards:SafeTask")
app.config_from_object("django.conf:settings", namespace="CELERY")
# A publish from a thread uses the same broker as one from the main thread.
app.set_default()
app.autodiscover_tasks()


@setup_logging.connect
def keep_our_logging(**_: Any) -> None:
    """Keep Django's LOGGING in workers."""


def list_rpa_queues(worker: Any) -> list[str]:
    """Return the queues of jobs that a worker consumes. One that consumes any is an execution worker."""
    return [name for name in worker.app.amqp.queues.consume_from if name not in CORE_QUEUES]


@celeryd_after_setup.connect
def refuse_unfit_worker(sender: str, instance: Any, conf: Any, **_: Any) -> None:
    """End a worker whose queues do not fit its role, its processes, its isolation or the name of its node."""
    from django.conf import settings

    # `sys.exit`, not an exception: Celery only logs exceptions of signal receivers.
    core = sorted(name for name in instance.app.amqp.queues.consume_from if name in CORE_QUEUES)
    runs_jobs = bool(list_rpa_queues(instance))
    # Jobs take minutes, touches milliseconds. Jobs must not occupy all processes.
    if core and runs_jobs and instance.concurrency <= settings.AFTERTOUCH_RPA_SLOTS:
        sys.exit(
            f"this worker consumes touches and RPA jobs, so its concurrency ({instance.concurrency}) must exceed "
            f"AFTERTOUCH_RPA_SLOTS ({settings.AFTERTOUCH_RPA_SLOTS})"
        )
    if core and settings.AFTERTOUCH_ROLE == "execution":
        sys.exit(f"AFTERTOUCH_ROLE: execution has no keys and cannot consume {', '.join(core)}")
    if not runs_jobs:
        return

    from django.db import DatabaseError, InterfaceError

    from rpa_tasks import isolation
    from rpa_tasks.worker.node import claim_node_name

    if problem := isolation.find_problem():
        if settings.AFTERTOUCH_RPA_ISOLATION_REQUIRED:
            sys.exit(f"this worker runs commands of flows. {problem}; set it to none to run them without isolation")
        log.warning("commands_not_isolated", detail=problem)
    try:
        is_own = claim_node_name()
    except (DatabaseError, InterfaceError) as error:  # the maintainer asks again at each report
        log.warning("node_name_unchecked", error=str(error))
    else:
        if not is_own:
            sys.exit(f"AFTERTOUCH_NODE: another execution node that runs is named {settings.AFTERTOUCH_NODE}")


@celeryd_after_setup.connect
def refuse_snap(sender: str, instance: Any, conf: Any, **_: Any) -> None:
    """Refuse a browser of snap that the setting names. One that would be found is logged: flows may need none."""
    from django.core.checks import ERROR

    from rpa_tasks.checks import browser_gaps

    for gap in browser_gaps() if list_rpa_queues(instance) else ():
        if gap.is_serious(ERROR):
            sys.exit(gap.msg)
        log.warning("browser_is_snap", detail=gap.msg)


@worker_process_init.connect
def freeze_gc(**_: Any) -> None:
    """Exclude loaded modules and settings from garbage collection, and collect less often.

    A process holds thousands of deliveries, none of them garbage. Python's own threshold of 700 objects searches them
    so often that a call costs half as much again.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@worker_process_shutdown.connect
def drain_sender(**_: Any) -> None:
    """Settle sent touches before a child process exits, and return waiting ones. Leases return what remains."""
    from scheduling.delivery.outgoing import BATCH_DEADLINE
    from scheduling.delivery.sender import sender
    from scheduling.webhooks import TIMEOUT, outbox_sender

    if outbox_sender.cache_info().currsize:
        outbox_sender().finish(TIMEOUT.total_seconds())
    if sender.cache_info().currsize:
        sender().finish(BATCH_DEADLINE.total_seconds())


@celeryd_after_setup.connect
def consume_node_queues(sender: str, instance: Any, conf: Any, **_: Any) -> None:
    """Consume the queues of shops whose preferred node is this one, because their browser profiles are here."""
    from django.conf import settings

    from rpa_tasks.jobs.wakeups import node_queue

    queues, node = instance.app.amqp.queues, settings.AFTERTOUCH_NODE
    for served in list_rpa_queues(instance):
        queues.select_add(queues.new_missing(node_queue(node, served)))  # declared in the same way as by publishers


@worker_ready.connect
def start_node_maintainer(sender: Any, **_: Any) -> None:
    """Start the node's maintainer process with an execution worker."""
    if queues := list_rpa_queues(sender):
        from rpa_tasks.maintainer import process

        worker = sender.controller
        process.start_maintainer(queues, worker.max_concurrency or worker.concurrency)


@worker_shutting_down.connect
def stop_accepting_jobs(**_: Any) -> None:
    """Stop picking jobs. Children check this before their next job."""
    from rpa_tasks.worker.node import stopping

    stopping[0] = 1


@worker_shutdown.connect
def stop_node_maintainer(**_: Any) -> None:
    from rpa_tasks.maintainer import process

    process.stop_maintainer()
