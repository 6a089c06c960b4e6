"""Patterns that editors give to a flow's payload are matched against what clients send: none of them may take for ever.
Where one did, this file would not end."""

import pytest

from rpa_tasks.jobs.publish import PublishRequest, publish_job
from scheduling.errors import InvalidInput
from tests.rpa_tasks.api.conftest import Market
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db


@each_row("pattern", [r"^(a+)+$", r"^(a|a)*$", r"^(([a-z])+.)+[A-Z]([a-z])+$", r"^(?=(a+)+b)", r"^(a+)+\1$"])
def test_pattern_of_payload_schema_runs_in_linear_time(pattern):
    market = Market()
    market.sync.payload_schema = {"properties": {"note": {"pattern": pattern}}}
    market.sync.save()
    with pytest.raises(InvalidInput):
        publish_job(PublishRequest("pdd", "s1", "sync_order", payload={"note": "a" * 60 + "!"}))
