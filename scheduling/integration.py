"""What other layers of this app add to those below them."""

from __future__ import annotations

from scheduling.admin.matrix import grid
from scheduling.app_integrations import FailedTaskOrigin, Integration
from scheduling.experiments import rollouts
from scheduling.models import Touch
from scheduling.monitoring import collectors, complaint_stats, history_stats, wanted_numbers
from scheduling.operations import failed_tasks, reversals

INTEGRATION = Integration(
    failed_tasks={"touch": FailedTaskOrigin(Touch, failed_tasks.REPUBLISHER)},
    reversals={
        "touch.cancel": reversals.CANCELLATION,
        "failed_task.retry": reversals.RETRY,
        "bulk.start": reversals.BULK_START,
        "pause": reversals.PAUSE,
        "node.off": grid.REVERSAL,
    },
    metrics=(
        collectors.LedgerCollector,
        collectors.BrokerCollector,
        rollouts.RolloutCollector,
        complaint_stats.ComplaintCollector,
        wanted_numbers.ScalingCollector,
        collectors.WebhookCollector,
        history_stats.HistoryCollector,
    ),
    scaling={"workers": wanted_numbers.measure_workers},
)
