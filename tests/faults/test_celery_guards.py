"""What ends a Celery worker or makes it lose a message, against real workers: with our guards, and without them.

The tests named `…_without_the_guard…` show the trap itself. They fail on the day upstream mends it; then the guard in
`config.celery.guards` can go. Their day is that of a campaign.
"""

import json
import time
from uuid import uuid4

import pytest
import redis
from kombu import Connection, Exchange

from config.celery.queues import TopicQueues, declared_queues, queue_of_routing_key
from scheduling.queue_names import CORE_QUEUES, RPA_QUEUES
from tests.faults.brokers import redis_server
from tests.faults.workers import worker
from tests.support.waiting import WAIT_LIMIT

CORE = ",".join(CORE_QUEUES)
RPA = ",".join(RPA_QUEUES)
PREFIX = "mq:"  #: of every key that kombu uses


@pytest.fixture(scope="module")
def broker(state_folder):
    """A separate broker, so that no other worker consumes these queues."""
    with redis_server(state_folder("misbehaving")) as server:
        yield server


@pytest.fixture
def worker_environment(fault_stack, broker):
    """The stack's database and the broker of this module, empty."""
    with redis.Redis.from_url(broker.url) as client:
        client.flushall()
    return {**fault_stack.stack.environment, "CELERY_BROKER_URL": broker.url}


def envelope(task, *args, body=None, **headers):
    """A message as Celery puts it into a list."""
    task_id = str(uuid4())
    return json.dumps(
        {
            "body": json.dumps([args, {}, {}]) if body is None else body,
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": {"lang": "py", "task": task, "id": task_id, "root_id": task_id, "parent_id": None, **headers},
            "properties": {
                "correlation_id": task_id,
                "delivery_mode": 2,
                "delivery_info": {"exchange": "", "routing_key": "touch.normal"},
                "priority": 0,
                "body_encoding": "utf-8",
                "delivery_tag": str(uuid4()),
            },
        }
    )


def push(broker, queue, item, prefix=PREFIX):
    with redis.Redis.from_url(broker.url) as client:
        client.lpush(prefix + queue, item)


def list_failed_messages(target, containing):
    """Reason, class and queue of the failed tasks that keep this message."""
    return target.sql(
        "SELECT reason, failure, channel FROM scheduling_failedtask WHERE origin = 'message' AND payload::text LIKE %s",
        [f"%{containing}%"],
    )


@pytest.fixture(scope="module")
def guarded(fault_stack, broker):
    """Our worker with tasks that misbehave. No test of it may end it."""
    environment = {**fault_stack.stack.environment, "CELERY_BROKER_URL": broker.url}
    with worker(environment, "-Q", CORE, "-c", "1", app="tests.faults.misbehaving_app") as program:
        program.await_ready()
        yield program


# --- items without a task ---------------------------------------------------------------------------------------------

POISON = {
    "raw text": ("unreadable", lambda mark: f"{mark} is not JSON"),
    "raw bytes": ("unreadable", lambda mark: b"\xff\xfe" + mark.encode()),
    "a JSON number in a list": ("unreadable", lambda mark: json.dumps([mark])),
    "an envelope without properties": ("unreadable", lambda mark: json.dumps({"body": mark})),
    "an unknown task": ("unknown_task", lambda mark: envelope(f"nobody.knows.{mark}")),
    "wrong arguments": ("task_error", lambda mark: envelope("bad.divide", mark)),
    "a task that fails": ("task_error", lambda mark: envelope("bad.divide", mark, 1)),
    "an undecodable body": ("undecodable", lambda mark: envelope("bad.divide", body=f"{{{mark}")),
    "another content type": (
        "invalid_task",
        lambda mark: envelope("bad.divide", mark).replace("application/json", "application/x-python-serialize"),
    ),
    "a body that is no task": ("invalid_task", lambda mark: envelope("bad.divide", body=json.dumps(mark))),
    "an empty body": ("invalid_task", lambda mark: envelope("bad.divide", body="null", parent_id=mark)),
    "an eta that is no time": ("invalid_task", lambda mark: envelope("bad.divide", mark, 1, eta="soon")),
    "a message without an id": ("invalid_task", lambda mark: envelope("bad.divide", mark, 1).replace('"id"', '"di"')),
    "a format from before Celery 4": ("unknown_format", lambda mark: _headless(mark)),
}


def _headless(mark):
    message = json.loads(envelope("bad.divide"))
    return json.dumps({**message, "headers": {}, "body": json.dumps({"what": mark})})


def test_poison_messages_become_failed_tasks(fault_stack, broker, guarded):
    marks = {name: f"m{uuid4().hex}" for name in POISON}
    another_version = f"m{uuid4().hex}"
    push(broker, "touch.normal", envelope(f"nobody.knows.{another_version}", periodic_task_name="a tick"))
    for name, (_, make) in POISON.items():
        push(broker, "touch.normal", make(marks[name]))
    _await_failed_messages(fault_stack, guarded, marks)
    assert not list_failed_messages(fault_stack, another_version)  # it comes again, and was dropped before the others
    for queue in ("touch.normal", "touch.high"):
        last = f"m{uuid4().hex}"
        push(broker, queue, envelope("bad.divide", last, 1))
        fault_stack.wait(lambda last=last: bool(list_failed_messages(fault_stack, last)), f"{queue} goes on")
    assert guarded.is_alive()
    found = {name: list_failed_messages(fault_stack, mark) for name, mark in marks.items()}
    assert {name: [row[0] for row in rows] for name, rows in found.items()} == {
        name: [reason] for name, (reason, _) in POISON.items()
    }
    assert {row[1] for rows in found.values() for row in rows} == {"unreadable"}


def _await_failed_messages(target, program, marks):
    deadline = time.monotonic() + WAIT_LIMIT
    while missing := [name for name, mark in marks.items() if not list_failed_messages(target, mark)]:
        assert program.is_alive(), f"the worker has ended:\n{program.log}"
        assert time.monotonic() < deadline, f"not buried: {missing}\n{program.log}"
        time.sleep(0.1)


@pytest.mark.campaign
def test_without_the_guard_raw_item_ends_worker(broker, worker_environment):
    with worker(worker_environment, "-Q", "ticks", "-c", "1", app="tests.faults.bare_app") as bare:
        bare.await_ready()
        push(broker, "ticks", "not JSON", prefix="")
        assert bare.await_exit() != 0


# --- memory -----------------------------------------------------------------------------------------------------------


def test_task_out_of_memory_keeps_worker_alive(fault_stack, broker, guarded):
    push(broker, "touch.normal", envelope("bad.out_of_memory"))
    guarded.await_log("eight exabytes")
    last = f"m{uuid4().hex}"
    push(broker, "touch.normal", envelope("bad.divide", last, 1))
    fault_stack.wait(lambda: bool(list_failed_messages(fault_stack, last)), "the next one runs")
    assert guarded.is_alive()


@pytest.mark.campaign
def test_without_the_guard_out_of_memory_ends_worker(broker, worker_environment):
    with worker(worker_environment, "-Q", "ticks", "-c", "1", app="tests.faults.bare_app") as bare:
        bare.await_ready()
        push(broker, "ticks", envelope("bad.out_of_memory"), prefix="")
        assert bare.await_exit() != 0


# --- an outage of Redis while a message is held -----------------------------------------------------------------------


def hold_a_message(program, broker, task, queue, prefix):
    program.await_ready()
    message = envelope(task, eta="2099-01-01T00:00:00+00:00")
    push(broker, queue, message, prefix=prefix)
    program.await_log(f"{task}[{json.loads(message)['headers']['id']}]")
    with redis.Redis.from_url(broker.url) as client:
        assert client.hlen(f"{prefix}unacked") == 1


def test_worker_holding_message_survives_redis_outage(fault_stack, broker, guarded, report_line):
    with redis.Redis.from_url(broker.url) as client:
        client.flushall()
    hold_a_message(guarded, broker, "bad.divide", "touch.normal", PREFIX)
    try:
        broker.kill()
        guarded.await_log("Trying again in")
    finally:
        broker.start()
    back_at, last = time.monotonic(), f"m{uuid4().hex}"
    push(broker, "touch.normal", envelope("bad.divide", last, 1))
    fault_stack.wait(lambda: bool(list_failed_messages(fault_stack, last)), "it consumes again")
    assert guarded.is_alive()
    took = time.monotonic() - back_at
    report_line(f"Redis outage while a message is held · the same worker consumes again {took:.1f} s after")


@pytest.mark.campaign
def test_without_the_guard_redis_outage_ends_worker(broker, worker_environment):
    with worker(worker_environment, "-Q", "ticks", "-c", "1", app="tests.faults.bare_app") as bare:
        hold_a_message(bare, broker, "bad.nothing", "ticks", "")
        try:
            broker.kill()
            assert bare.await_exit() != 0
            assert "Unrecoverable error: AttributeError" in bare.log
        finally:
            broker.start()


# --- what a worker may consume ----------------------------------------------------------------------------------------


def test_mixed_worker_needs_more_processes_than_slots(worker_environment):
    both = f"{CORE},{RPA}"
    environment = {**worker_environment, "AFTERTOUCH_RPA_SLOTS": "2"}
    with worker(environment, "-Q", both, "-c", "2") as too_few:
        assert too_few.await_exit() != 0
        assert "AFTERTOUCH_RPA_SLOTS (2)" in too_few.log
    with worker(environment, "-Q", both, "-c", "3") as enough:
        enough.await_ready()


def test_dedicated_queues_hang_on_the_topic_exchange(rabbit):
    """One key reaches one queue, and names it again where only the key is known."""
    dedicated = [*(f"p.td.{tier}" for tier in RPA_QUEUES), "s.pdd.flag:1", "s.pdd.other", "n.n:1.p.td.high"]
    keys = {
        "task.td.high": "high", "task.p:d.high": "high", "task.pdd.low": "low", "own.td.high": "p.td.high",
        "task.pdd.flag:1": "s.pdd.flag:1", "n.n:1.p.td.high": "n.n:1.p.td.high",
    }  # fmt: skip
    confirmed = {"confirm_publish": True}
    with Connection(rabbit.url, transport_options=confirmed) as connection:
        queues = TopicQueues(declared_queues(rabbit.url))
        channel = connection.default_channel
        for name in (*RPA_QUEUES, *dedicated):
            queues[name](channel).declare()
        for key, queue in keys.items():
            connection.Producer().publish({}, exchange=Exchange("tasks", "topic"), routing_key=key)
            depths = {name: channel.queue_declare(name, passive=True)[1] for name in (*RPA_QUEUES, *dedicated)}
            assert (
                {name: depth for name, depth in depths.items() if depth} == {queue: 1} == {queue_of_routing_key(key): 1}
            )
            channel.queue_purge(queue)


def test_topic_exchange_routes_by_priority(fault_stack, worker_environment, rabbit):
    marks = {priority: f"m{uuid4().hex}" for priority in RPA_QUEUES}
    with Connection(rabbit.url, transport_options={"confirm_publish": True}) as connection:
        for queue in declared_queues(rabbit.url):
            queue(connection.default_channel).declare()
        for priority, mark in marks.items():
            connection.Producer().publish(
                json.loads(envelope(f"rpa.{mark}"))["headers"],
                exchange=Exchange("tasks", "topic"),
                routing_key=f"task.pdd.{priority}",
                headers=json.loads(envelope(f"rpa.{mark}"))["headers"],
            )
        depths = {name: connection.default_channel.queue_declare(name, passive=True)[1] for name in RPA_QUEUES}
        assert depths == dict.fromkeys(RPA_QUEUES, 1)
    environment = {**worker_environment, "CELERY_BROKER_URL": rabbit.url}
    with worker(environment, "-Q", RPA, "-c", "1") as execution:
        execution.await_ready()
        _await_failed_messages(fault_stack, execution, marks)
    assert {priority: list_failed_messages(fault_stack, mark)[0][2] for priority, mark in marks.items()} == {
        priority: f"task.pdd.{priority}" for priority in RPA_QUEUES
    }
