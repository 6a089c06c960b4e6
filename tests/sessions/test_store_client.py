"""Responses of a server that count as unavailable."""

import pytest
from redis._parsers.base import BaseParser
from redis.exceptions import ResponseError

from sessions.store.client import StoreUnavailable, raise_first_error
from tests.support.tables import each_row


@each_row(
    "error, answer",
    [
        (StoreUnavailable, "OOM command not allowed when used memory > 'maxmemory'. script: 5c1, on @user_script:12."),
        (StoreUnavailable, "MISCONF Valkey is configured to save RDB snapshots, but it's currently unable to persist."),
        (StoreUnavailable, "NOREPLICAS Not enough good replicas to write."),
        (StoreUnavailable, "READONLY You can't write against a read only replica."),
        (StoreUnavailable, "TRYAGAIN Multiple keys request during rehashing of slot"),
        (StoreUnavailable, "LOADING Valkey is loading the dataset in memory"),
        (StoreUnavailable, "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'."),
        (StoreUnavailable, "CLUSTERDOWN The cluster is down"),
        (StoreUnavailable, "BUSY Valkey is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE."),
        (ResponseError, "NOPERM User web has no permissions to run the 'evalsha' command"),
        (ResponseError, "WRONGTYPE Operation against a key holding the wrong kind of value"),
        (ResponseError, "BUSYKEY Target key name already exists."),
    ],
)
def test_only_temporary_errors_of_a_server_count_as_unavailable(error, answer):
    with pytest.raises(error):
        raise_first_error([1, BaseParser.parse_error(answer)])
