"""Celery as it comes, on the broker of the environment: what happens without our guards."""

from __future__ import annotations

from celery import Celery

from config.environment import environment

app = Celery("bare", broker=environment().broker)
app.conf.update(
    task_serializer="json",
    accept_content=["json"],
    task_ignore_result=True,
    task_default_queue="ticks",
    broker_connection_max_retries=None,
    broker_connection_timeout=2,
    broker_transport_options={"socket_timeout": 10, "socket_connect_timeout": 2, "visibility_timeout": 300},
)


@app.task(name="bad.out_of_memory")
def out_of_memory() -> None:
    raise MemoryError("eight exabytes")


@app.task(name="bad.nothing")
def nothing() -> None:
    """Held until its eta."""
