"""An address with TLS means the same to every client: the server is verified by authority and name."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from django.core.checks import run_checks
from kombu import Connection
from kombu.exceptions import OperationalError

from config.environment import ROOT
from config.local.processes import wait_until
from config.settings.connections import build_broker
from sessions.store.client import Server, StoreUnavailable
from tests.faults.workers import worker
from tests.security.tls_servers import Authority, tls_rabbitmq, tls_redis, tls_sentinel
from tests.support.waiting import WAIT_LIMIT

PASSWORD = "hid&den@1"
ENCODED = "hid%26den%401"
WEB = "user web on >" + PASSWORD + " ~* &* +@all"
LOGIN = {"username": "web", "password": PASSWORD}
OTHER_SERVERS = ("CELERY_BROKER_URL", "AFTERTOUCH_SESSIONS_REDIS_URL", "AFTERTOUCH_GATEWAY_REDIS_URL")


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    """The one of the servers, and a stranger."""
    folder = tmp_path_factory.mktemp("tls")
    return Authority.make(folder / "ours"), Authority.make(folder / "other")


@pytest.fixture(scope="module")
def redis_port(authorities, tmp_path_factory):
    with tls_redis(tmp_path_factory.mktemp("redis"), authorities[0], "user default off", WEB, **LOGIN) as port:
        yield port


def build_environment(state_dir, **env):
    return {
        **{name: value for name, value in os.environ.items() if name not in OTHER_SERVERS},
        "DJANGO_SETTINGS_MODULE": "config.settings.test", "AFTERTOUCH_STATE_DIR": str(state_dir), **env,
    }  # fmt: skip


def connect_all(state_dir, **env):
    """Return the error of each client of the product, "" for one that connected."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.security.tls_clients"], cwd=ROOT, env=build_environment(state_dir, **env),
        capture_output=True, text=True, timeout=WAIT_LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    assert ENCODED not in done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 5
    return found


@pytest.mark.parametrize(
    ("host", "stranger", "option", "connects"),
    [
        ("127.0.0.1", False, "", True),
        ("127.0.0.1", True, "", False),
        ("127.0.0.2", False, "", False),
        ("127.0.0.2", False, "&ssl_check_hostname=false", True),
    ],
)
def test_clients_of_redis_verify_authority_and_name(
    authorities, redis_port, tmp_path, host, stranger, option, connects
):
    ours, other = authorities
    query = ours.query.replace(ours.path("ca.pem"), (other if stranger else ours).path("ca.pem"))
    found = connect_all(tmp_path, REDIS_URL=f"rediss://web:{ENCODED}@{host}:{redis_port}/0?{query}{option}")
    assert {name for name, error in found.items() if not error} == (set(found) if connects else set()), found


def test_sentinels_with_login_and_tls_lead_to_servers_with_tls(authorities, redis_port, tmp_path):
    ours, other = authorities
    with tls_sentinel(tmp_path, ours, redis_port, user="watcher", password=PASSWORD) as port:
        address = f"sentinel://web:{ENCODED}@127.0.0.1:{port}/0;sentinel://127.0.0.1:1"  # the second one is away
        login = f"username=watcher&password={ENCODED}"
        stranger = ours.query.replace(ours.path("ca.pem"), other.path("ca.pem"))
        cases = {
            (f"?ssl=true&{ours.query}", f"{login}&ssl=true&{ours.query}"): True,
            (f"?ssl=true&{ours.query}", f"{login}&ssl=true&{stranger}"): False,
            (f"?ssl=true&{ours.query}", f"ssl=true&{ours.query}"): False,
        }
        environments = [
            {"REDIS_URL": address + query, "AFTERTOUCH_SENTINEL_URL_OPTIONS": options} for query, options in cases
        ]
        with ThreadPoolExecutor() as threads:
            answers = list(threads.map(lambda env: connect_all(tmp_path, **env), environments))
        for found, connects in zip(answers, cases.values(), strict=True):
            assert {name for name, error in found.items() if not error} == (set(found) if connects else set()), found
        environment = build_environment(tmp_path, **environments[0])
        with worker(environment, "-Q", "ticks", "-c", "1", "-n", "tls@node") as program:
            program.await_ready()
            ping = [sys.executable, "-m", "celery", "-A", "config", "inspect", "-d", "tls@node", "-t", "30", "ping"]
            done = subprocess.run(ping, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_LIMIT)
            assert "pong" in done.stdout, done.stdout + done.stderr


def test_nodes_of_a_cluster_are_verified(authorities, redis_port, tmp_path, settings):
    ours, other = authorities

    def refuse(address):
        settings.AFTERTOUCH_SESSIONS_REDIS_URL = address
        return [each.msg for each in run_checks() if each.id == "aftertouch.E006"]

    with tls_redis(tmp_path, ours, "cluster-enabled yes", "tls-cluster yes", "user default off", WEB, **LOGIN) as port:
        with redis.Redis(port=port, host="127.0.0.1", ssl=True, **ours.client, **LOGIN) as node:
            node.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            assert wait_until(lambda: node.execute_command("CLUSTER INFO")["cluster_state"] == "ok", WAIT_LIMIT)
        right = f"rediss+cluster://web:{ENCODED}@127.0.0.1:{port}?{ours.query}"
        server = Server(right)
        assert server.ask(lambda pipe: pipe.set("tls", "1"))
        server.client.close()
        for wrong in (
            f"redis+cluster://web:{ENCODED}@127.0.0.1:{port}",
            right.replace("127.0.0.1", "127.0.0.2"),
            right.replace(ours.path("ca.pem"), other.path("ca.pem")),
        ):
            with pytest.raises(StoreUnavailable):
                Server(wrong).ask(lambda pipe: pipe.get("tls"))
        assert refuse(right) == []
        assert "single server" in refuse(f"rediss://web:{ENCODED}@127.0.0.1:{port}?{ours.query}")[0]
        assert "without cluster mode" in refuse(right.replace(str(port), str(redis_port)))[0]


def test_clients_of_rabbitmq_verify_authority_and_name(authorities, state_folder, monkeypatch):
    """Each host of a list is verified by its own name, and again after each loss of the connection."""
    ours, other = authorities

    def connect(hosts):
        address, tls = build_broker(hosts)
        with Connection(address, ssl=tls, connect_timeout=10) as connection:
            for _ in range(2):
                connection.ensure_connection(max_retries=2, interval_start=0)
                connection.collect()

    with tls_rabbitmq(state_folder("rabbitmq"), ours) as port:
        right = f"amqps://guest:guest@127.0.0.1:{port}//?{ours.query}"
        localhost = right.replace("127.0.0.1", "localhost")
        connect(right)
        connect(f"{localhost};{right}")
        connect(f"{localhost}&ssl_check_hostname=false")
        connect(f"{localhost}&ssl_cert_reqs=none")
        for wrong in (
            localhost, right.replace(ours.path("ca.pem"), other.path("ca.pem")),
            right.replace(ours.query, f"ssl_ca_certs={ours.path('ca.pem')}"),
        ):  # fmt: skip
            with pytest.raises(OperationalError):
                connect(wrong)
