"""What this app adds to `scheduling`."""

from __future__ import annotations

from rpa_tasks import configuration, metrics
from rpa_tasks.admin import dashboard, job, labels, shop
from rpa_tasks.jobs import dead_letters, personal_data, queries, retention, schedules, wakeups
from rpa_tasks.models import Job
from scheduling.app_integrations import FailedTaskOrigin, Integration, PersonalData, ScheduledRound

INTEGRATION = Integration(
    failed_tasks={"rpa_job": FailedTaskOrigin(Job, dead_letters.REPUBLISHER, job.evidence_panel)},
    reversals={"job.cancel": dead_letters.REVERSAL},
    row_actions=queries.JOB_ACTIONS,
    scheduled_rounds={
        "rpa_tasks.publish_for_shops": ScheduledRound(schedules.check_arguments, schedules.publish_round)
    },
    reasons=labels.REASONS,
    reason_prefixes=labels.PREFIXES,
    retention=(retention.JOBS, retention.WINDOWS),
    personal_data=(
        PersonalData(
            "rpa_jobs",
            personal_data.export_jobs,
            personal_data.erase_jobs_of_customer,
            personal_data.erase_jobs_of_touches,
        ),
    ),
    bootstrap=(configuration.ship_platforms,),
    metrics=(metrics.read_rpa,),
    scaling={"execution_nodes": metrics.measure_execution_nodes},
    queues=(wakeups.list_extra_queues,),
    menu=labels.MENU,
    searches=shop.SEARCHES,
    cards=(dashboard.card,),
    overview_actions=(dashboard.list_logins,),
    worker_lists=(dashboard.list_execution_workers,),
)
