"""What other layers of this app add to those below them."""

from __future__ import annotations

from scheduling.admin.matrix import grid
from scheduling.app_integrations import FailedTaskOrigin, Integration
from scheduling.models import BulkAction, FailedTask, Pause, Touch
from scheduling.monitoring import collectors, wanted_numbers
from scheduling.operations import bulk_actions, commands, failed_tasks
from scheduling.operations.undo import Reversal

INTEGRATION = Integration(
    failed_tasks={"touch": FailedTaskOrigin(Touch, failed_tasks.REPUBLISHER)},
    reversals={
        "touch.cancel": Reversal(
            Touch._meta.label_lower, "scheduling.change_touch", commands.plan_touch_again, commands.lock_customers_of
        ),
        "failed_task.retry": Reversal(
            FailedTask._meta.label_lower,
            "scheduling.act_on_failedtask",
            failed_tasks.withdraw_retry,
            failed_tasks.lock_retried,
        ),
        # The user had the permission of the action when it started.
        "bulk.start": Reversal(BulkAction._meta.label_lower, "scheduling.view_bulkaction", bulk_actions.undo_start),
        "pause": Reversal(Pause._meta.label_lower, "scheduling.delete_pause", commands.end_own_pause),
        "node.off": grid.REVERSAL,
    },
    metrics=(
        collectors.read_ledger,
        collectors.read_broker_metrics,
        collectors.read_rollouts,
        collectors.read_complaints,
        wanted_numbers.read_wanted_numbers,
        collectors.read_webhooks,
        collectors.read_ends,
    ),
    scaling={"workers": wanted_numbers.measure_workers},
)
