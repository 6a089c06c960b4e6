"""Every parameter of `DATABASE_URL` reaches PostgreSQL's client, for Django and for the lock of beat."""

from urllib.parse import quote

import psycopg
import pytest
from django.db import OperationalError, connection
from django.db.utils import ConnectionHandler

from config.celery import beat_scheduler
from config.settings.connections import build_database

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def connect(monkeypatch):
    """Connect as Django does by an address with these hosts and parameters. The lock of beat uses the same address."""

    def connect(hosts, query):
        given = connection.get_connection_params()
        sign_in = f"{given['user']}:{quote(given['password'], safe='')}"
        addresses = hosts.replace("real", f"{given['host']}:{given['port']}")
        url = f"postgresql://{sign_in}@{addresses}/{given['dbname']}?{query}"
        made = ConnectionHandler({"default": build_database(url, prepare_statements=True)})["default"]
        monkeypatch.setattr(beat_scheduler, "database", made)
        return made

    return connect


def test_second_of_several_hosts_is_used(connect):
    made = connect("127.0.0.1:1,real", "target_session_attrs=read-write")
    with made.cursor() as cursor:
        cursor.execute("SELECT 1")
    made.close()
    lock = beat_scheduler._open_lock_connection()
    assert lock.execute("SELECT 1").fetchone() == (1,)
    lock.close()


def test_server_without_the_demanded_state_or_certificate_is_refused(connect):
    for query in ("target_session_attrs=standby", "sslmode=verify-full", "sslmode=require"):
        with pytest.raises(OperationalError):
            connect("real", query).ensure_connection()
        with pytest.raises(psycopg.OperationalError):
            beat_scheduler._open_lock_connection()
