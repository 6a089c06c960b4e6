"""Each table that is written with every event, touch or job is vacuumed long before a fifth of it has changed."""

import pytest

from scheduling import sql
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db
HOT = [
    "scheduling_touch_live", "scheduling_event", "scheduling_customer",
    "scheduling_failedtask", "rpa_tasks_job", "rpa_tasks_run", "rpa_tasks_evidence", "rpa_tasks_lane",
]  # fmt: skip


@each_row("table", HOT)
def test_hot_table_has_own_autovacuum_settings(table):
    ((given,),) = sql.rows("SELECT reloptions FROM pg_class WHERE oid = %(table)s::text::regclass", {"table": table})
    options = dict(each.split("=") for each in given)
    assert float(options["autovacuum_vacuum_scale_factor"]) <= 0.05
    assert float(options["autovacuum_analyze_scale_factor"]) <= 0.05
