"""Responses of a server that count as unavailable."""

from __future__ import annotations

import pytest
from redis._parsers.base import BaseParser
from redis.exceptions import ResponseError

from sessions.store.client import Server, StoreUnavailable, raise_first_error
from tests.support.tables import each_row


@each_row(
    "answer",
    [
        "OOM command not allowed when used memory > 'maxmemory'. script: 5c1, on @user_script:12.",
        "MISCONF Valkey is configured to save RDB snapshots, but it's currently unable to persist to disk.",
        "NOREPLICAS Not enough good replicas to write.",
        "READONLY You can't write against a read only replica.",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "LOADING Valkey is loading the dataset in memory",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "CLUSTERDOWN The cluster is down",
        "BUSY Valkey is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    ],
)
def test_temporary_server_error_raises_store_unavailable(answer: str) -> None:
    with pytest.raises(StoreUnavailable):
        raise_first_error([1, BaseParser.parse_error(answer)])


@each_row(
    "answer",
    [
        "NOPERM User web has no permissions to run the 'evalsha' command",
        "WRONGTYPE Operation against a key holding the wrong kind of value",
        "BUSYKEY Target key name already exists.",
    ],
)
def test_permanent_server_error_is_raised_unchanged(answer: str) -> None:
    with pytest.raises(ResponseError):
        raise_first_error([1, BaseParser.parse_error(answer)])


def test_unknown_script_is_no_outage() -> None:
    with pytest.raises(KeyError):
        Server("redis://127.0.0.1:1/0").run([("note_activty", [], [])])
