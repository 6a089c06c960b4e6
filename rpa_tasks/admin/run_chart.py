"""Chart of run outcomes per hour."""

from __future__ import annotations

from collections import Counter
from datetime import datetime

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from scheduling import sql
from scheduling.admin.count_time_limits import PageTimeLimit
from scheduling.admin.dashboard.charts import Bucket, Chart, Series, Span, build_stacked_chart, count_by_span
from scheduling.admin.touches.touch import build_span_link
from scheduling.monitoring.statistics import HourlyCache, hours_between

OUTCOME_SERIES = (
    Series("done", gettext_lazy("Done"), "good"),
    Series("again", gettext_lazy("Tried again"), "wait"),
    Series("cancelled", gettext_lazy("Cancelled"), "quiet"),
    Series("failed", gettext_lazy("Failed"), "bad"),
)


def count_ended_runs(since: datetime, until: datetime) -> dict[datetime, Counter[str]]:
    """Count runs by outcome for each hour after `since`. Deferred runs do not count."""
    found: dict[datetime, Counter[str]] = {hour: Counter() for hour in hours_between(since, until)}
    for hour, end, count in sql.rows(_ENDED, {"since": since, "until": until}):
        found[hour][end] += count
    return found


# A failed job was not claimed after its last run.
_ENDED = """
SELECT date_bin('1 hour', run.ended_at, %(since)s),
       CASE WHEN run.outcome = 'succeeded' THEN 'done' WHEN run.outcome = 'cancelled' THEN 'cancelled'
            WHEN job.state IN ('failed', 'unknown') AND job.lease_no = run.lease_no THEN 'failed' ELSE 'again' END,
       count(*)
FROM rpa_tasks_run AS run JOIN rpa_tasks_job AS job ON job.task_id = run.job_id
WHERE run.ended_at >= %(since)s AND run.ended_at < %(until)s AND NOT (run.outcome = 'held') GROUP BY 1, 2
"""

run_history = HourlyCache(count_ended_runs)


def runs_chart(spans: list[Span], time_limit: PageTimeLimit, *, may_see_failed: bool) -> Chart:
    """Build the chart. Failed runs link to their failed tasks; no list shows the others by outcome."""

    def links(since: datetime, until: datetime) -> dict[str, str]:
        if not may_see_failed:
            return {}
        origin = {"state": "all", "origin__exact": "rpa_job"}
        return {"failed": build_span_link("scheduling_failedtask", "failed_at", since, until, **origin)}

    counts = count_by_span(run_history, spans, time_limit)
    buckets = [
        Bucket(span.label, found, links(span.hours[0], span.until)) for span, found in zip(spans, counts, strict=True)
    ]
    whole = links(spans[0].hours[0], spans[-1].until)
    return build_stacked_chart(
        "runs", _("RPA runs, and how they ended"), OUTCOME_SERIES, buckets, lambda key: whole.get(key, "")
    )
