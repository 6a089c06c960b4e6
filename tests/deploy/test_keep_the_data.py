"""The page about backups, followed line by line: each store is lost and restored, and the work goes on.

PostgreSQL and Redis are a bare machine's. Aftertouch runs from this checkout, with a receiver that counts.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
import redis

from config.environment import ROOT
from tests.deploy.bare_machine import BareMachine, bare_machine, create_cluster, postgres, redis_server
from tests.docs.pages import blocks
from tests.faults.receiver import EffectReceiver
from tests.support.small_matrix import small_matrix
from tests.support.stack import StackUnderTest, cloud_event, run_stack

PAGE = (ROOT / "docs/how-to/keep-the-data.md").read_text("utf-8")
(
    PATHS, DUMP, RESTORE_DUMP, PAUSE, ARCHIVE, BASE_BACKUP, ARCHIVED, RESTORE_LOG, UNTIL, LOG_RESTORED,
    SNAPSHOT, RESTORE_SNAPSHOT, SNAPSHOT_RESTORED,
) = blocks(PAGE, "console")  # fmt: skip
#: Of the guide to deploying: the role with its database, and the configuration of Redis.
GUIDE = blocks((ROOT / "docs/how-to/deploy.md").read_text("utf-8"), "console")[1:3]
PROGRAMS = ("web", "core", "ticks", "beat", "watcher")
WAITING = 20

pytestmark = pytest.mark.timeout(1200)  # a whole stack starts within the test, and again after each loss


@dataclass
class Installation:
    machine: BareMachine
    receiver: EffectReceiver
    servers: dict[str, ExitStack] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    programs: StackUnderTest = field(init=False)

    def type(self, *commands):
        return self.machine.run(PATHS + "".join(commands))

    def start(self, *names):
        for name in names:
            self.servers[name] = ExitStack()
            server = {"PostgreSQL": postgres, "Redis": redis_server}[name]
            self.processes[name] = self.servers[name].enter_context(server(self.machine))

    def stop(self, name):
        self.servers.pop(name).close()

    def crash(self, name):
        """End without a word to the disk. PostgreSQL gets SIGQUIT, which ends its children too."""
        self.processes[name].send_signal(signal.SIGQUIT if name == "PostgreSQL" else signal.SIGKILL)
        self.processes[name].wait(60)
        self.stop(name)

    def login(self, name):
        """The password that the guide made."""
        acl = Path(self.machine.here("/etc/redis/users.acl")).read_text()
        return re.findall(rf"^user {name} on >(\S+)", acl, re.MULTILINE)[0]

    @property
    def redis_url(self):
        return f"redis://admin:{self.login('admin')}@127.0.0.1:{self.machine.ports['6379']}/0"

    def stop_programs(self, *names):
        """All at once: each takes seconds to end."""
        with ThreadPoolExecutor(len(names)) as many:
            list(many.map(self.programs.stack.stop, names))

    def start_programs(self, *names):
        with ThreadPoolExecutor(len(names)) as many:
            list(many.map(self.programs.stack.start, names))

    def send(self, kind, *users):
        self.programs.post_events(*(cloud_event(f"{kind}-{user}", kind, user) for user in users))

    def speak(self, chat):
        """A customer writes in a chat, which arms its timer."""
        body = {"user_id": f"of-{chat}", "chat_id": chat, "from": "user", "kind": "message"}
        self.programs.call("POST", f"/api/v1/sessions/{chat}/activity", body)

    def calls(self):
        """Calls of the receiver by event."""
        return Counter(call.event for call in list(self.receiver.calls))

    def states(self):
        return dict(
            self.machine.ask(
                "aftertouch",
                "SELECT e.event_id, t.state FROM scheduling_touch AS t JOIN scheduling_event AS e ON e.id = t.event_id",
            )
        )

    def await_states(self, state, events):
        self.programs.wait(lambda: {self.states()[each] for each in events} == {state}, f"{events} are {state}")

    def rows(self):
        """Number and digest of the rows of each table."""
        tables = self.machine.ask(
            "aftertouch",
            "SELECT c.relname FROM pg_class AS c WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r'",
        )
        digest = "SELECT count(*), coalesce(md5(string_agg(t::text, '|' ORDER BY t::text)), '') FROM {} AS t"
        return {name: self.machine.ask("aftertouch", digest.format(f'"{name}"'))[0] for (name,) in tables}


def configuration(receiver):
    return small_matrix(
        receiver.channel(),
        {"key": "now", "trigger": "order.paid"},
        {"key": "next-week", "trigger": "signup.succeeded", "delay": "7d"},
        {"key": "silent", "trigger": "session.silent"},
        silence_policies=[{"tag": "default", "threshold": "5s", "jitter": "0s"}],
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    for program in ("openssl", "redis-cli"):
        if shutil.which(program) is None:
            pytest.skip(f"missing service: {program}")
    with bare_machine() as machine, EffectReceiver(answer_after=(0, 0)) as receiver, ExitStack() as ends:
        machine.env["PGUSER"] = "postgres"
        shutil.copytree(ROOT / "deploy", machine.folder / "opt/aftertouch/deploy")
        (machine.folder / "var/backups/postgresql/wal").mkdir()
        machine.own(machine.folder)
        create_cluster(machine)
        installed = Installation(machine, receiver)
        ends.callback(lambda: [each.close() for each in installed.servers.values()])
        installed.start("PostgreSQL")
        password = machine.run("".join(GUIDE) + 'echo "$DB_PASSWORD"').split()[-1]
        installed.type(ARCHIVE)
        installed.stop("PostgreSQL")
        installed.start("PostgreSQL", "Redis")
        env = {
            "DATABASE_URL": f"postgresql://aftertouch:{password}@127.0.0.1:{machine.ports['5432']}/aftertouch",
            "REDIS_URL": installed.redis_url, "AFTERTOUCH_ALLOWED_PRIVATE_HOSTS": receiver.address,
        }  # fmt: skip
        with run_stack(tmp_path_factory.mktemp("state"), PROGRAMS, env) as stack:
            installed.programs = StackUnderTest(stack)
            installed.programs.create_api_key("events", "sessions")
            installed.programs.apply_config(configuration(receiver))
            yield installed


def test_restored_snapshot_keeps_armed_chat(installed):
    installed.stop_programs("watcher")
    installed.speak("before")
    installed.type(SNAPSHOT)
    installed.speak("after")
    with redis.Redis.from_url(installed.redis_url) as client:
        client.flushall()
    installed.crash("Redis")
    installed.type(RESTORE_SNAPSHOT)
    installed.start("Redis")
    assert "aof_last_bgrewrite_status:ok" in installed.type(SNAPSHOT_RESTORED)
    installed.crash("Redis")  # the new append-only file is complete
    installed.start("Redis")
    installed.start_programs("watcher")
    silent = "SELECT e.user_id FROM scheduling_event AS e WHERE e.type = 'session.silent'"
    installed.programs.wait(lambda: bool(installed.machine.ask("aftertouch", silent)), "the silence is recorded")
    ended = f"{silent} AND EXISTS (SELECT FROM scheduling_touch AS t WHERE t.event_id = e.id AND t.state = 'delivered')"
    installed.programs.wait(lambda: bool(installed.machine.ask("aftertouch", ended)), "the guide message is delivered")
    assert installed.machine.ask("aftertouch", silent) == [("of-before",)]
    assert [calls for event, calls in installed.calls().items() if event.startswith("before")] == [1]


def test_restored_database_delivers_what_waited(installed):
    """To the last moment nothing is repeated. To an earlier one, and from a dump, deliveries since are repeated."""
    waiting = [f"order.paid-user-{number}" for number in range(WAITING)]
    installed.send("order.paid", "ann")
    installed.await_states("delivered", ["order.paid-ann"])
    installed.stop_programs("core")
    installed.send("order.paid", *(each.removeprefix("order.paid-") for each in waiting))
    installed.send("signup.succeeded", "ann")
    installed.await_states("queued", waiting)
    installed.stop_programs("ticks", "beat", "watcher")
    installed.type(BASE_BACKUP, DUMP)
    then, until = installed.rows(), datetime.now(UTC)
    installed.start_programs("core")
    installed.await_states("delivered", waiting)
    installed.stop_programs("core")
    installed.send("order.paid", "late")
    installed.stop_programs("web")
    last = installed.rows()
    assert installed.calls()["order.paid-user-0"] == 1

    # The folder is lost but for the last segments: no row is lost, no touch is repeated.
    installed.crash("PostgreSQL")
    installed.type(RESTORE_LOG)
    installed.start("PostgreSQL")
    installed.type(LOG_RESTORED)
    assert installed.rows() == last
    installed.start_programs("core", "ticks", "beat")
    installed.await_states("delivered", ["order.paid-late"])
    installed.stop_programs("core", "ticks", "beat")
    assert {installed.calls()[each] for each in ["order.paid-ann", "order.paid-late", *waiting]} == {1}
    assert installed.type(ARCHIVED).startswith("0|")

    # To an earlier moment: the rows of then.
    installed.crash("PostgreSQL")
    installed.machine.run(f"rm -rf {installed.machine.here('/var/lib/postgresql/15/main.lost')}")
    installed.type(RESTORE_LOG, re.sub(r"UNTIL='.*'", f"UNTIL='{until.isoformat()}'", UNTIL))
    installed.start("PostgreSQL")
    installed.type(LOG_RESTORED)
    assert installed.rows() == then
    installed.programs.stack.manage(*shlex.split(PAUSE)[2:])
    assert installed.machine.ask("aftertouch", "SELECT scope FROM scheduling_pause") == [("all",)]

    # From the dump: the same rows, and no pause.
    installed.type(RESTORE_DUMP)
    assert installed.rows() == then
    with redis.Redis.from_url(installed.redis_url) as client:
        client.flushall()
    installed.start_programs("core", "ticks", "beat")
    installed.await_states("delivered", waiting)
    installed.stop_programs("core", "ticks", "beat")
    assert {installed.calls()[each] for each in waiting} == {2}
    assert installed.calls()["order.paid-ann"] == installed.calls()["order.paid-late"] == 1
    assert installed.states()["signup.succeeded-ann"] == "scheduled"
    keys = {(call.event, call.key) for call in installed.receiver.calls if call.event in waiting}
    assert len(keys) == WAITING  # an idempotent receiver recognises each repeat
