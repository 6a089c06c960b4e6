"""Name how the acts on touches, failed tasks, bulk actions and pauses are taken back (see `undo`)."""

from __future__ import annotations

from scheduling.models import BulkAction, FailedTask, Pause, Touch
from scheduling.operations import bulk_actions, commands, failed_tasks
from scheduling.operations.undo import Reversal

CANCELLATION = Reversal(
    Touch._meta.label_lower, "scheduling.change_touch", commands.plan_touch_again, commands.lock_customers_of
)
RETRY = Reversal(
    FailedTask._meta.label_lower, "scheduling.act_on_failedtask", failed_tasks.withdraw_retry, failed_tasks.lock_retried
)
#: The user had the permission of the action when it started.
BULK_START = Reversal(BulkAction._meta.label_lower, "scheduling.view_bulkaction", bulk_actions.undo_start)
PAUSE = Reversal(Pause._meta.label_lower, "scheduling.delete_pause", commands.end_own_pause)
