"""What KEDA and scripts read."""

import pytest

from tests.scheduling.api.serving import Client

pytestmark = pytest.mark.django_db(transaction=True)


def test_scaling_without_redis_has_only_numbers_of_postgresql(api, server_without_redis, key, valkey):
    known, unknown = {"running": 0, "wanted": 1}, {"running": None, "wanted": None}
    for client, others in ((api, known), (Client(server_without_redis, key), unknown)):
        answer = client.get("/scaling")
        assert answer.status_code == 200
        assert answer.json() == {"workers": others, "execution_nodes": known, "watchers": others}
