"""Export a customer's data from jobs, and erase it from jobs and schedules.

These are jobs that name the customer or deliver its touches. In an erasure a waiting job is cancelled, unless further
requests have merged into it: they may be of others, who lose nothing. Such a job and a running one delay the erasure
until they have ended.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial, reduce
from operator import or_
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Q
from django_celery_beat.models import PeriodicTask, PeriodicTasks

from rpa_tasks.jobs.ledger import job_ledger
from rpa_tasks.jobs.payloads import ERASED_KEY
from rpa_tasks.models import Job
from scheduling import sql
from scheduling.customers.erasure import ErasureDelayed
from scheduling.ledger import anonymization
from scheduling.ledger.anonymization import Identity, build_json_search


def export_jobs(who: Identity, delivery_keys: Sequence[UUID], most: int) -> list[dict[str, Any]]:
    """Return the latest jobs of the customer with their runs, at most `most`, for JSON."""
    given = {**who.build_search(), "keys": list(delivery_keys), "most": most}
    found = [row[0] for row in sql.rows(_LATEST_JOBS, given)]
    jobs = Job.objects.filter(pk__in=found).select_related("shop__platform", "flow").prefetch_related("runs")
    return [_export_job(job) for job in jobs.order_by("-pk")]


def _export_job(job: Job) -> dict[str, Any]:
    return {
        "task_id": job.pk, "platform": job.shop.platform.key, "shop_id": job.shop.shop_id,
        "task_type": job.flow.task_type, "state": job.state, "reason": job.reason, "due_at": job.due_at,
        "settled_at": job.settled_at, "payload": job.payload, "dedupe_key": job.dedupe_key, "result": job.result,
        "runs": [
            {"started_at": run.started_at, "ended_at": run.ended_at, "outcome": run.outcome, "reason": run.reason,
             "detail": run.detail}
            for run in job.runs.all()
        ],
    }  # fmt: skip


def erase_jobs_of_touches(delivery_keys: Sequence[UUID]) -> int:
    """Empty the jobs that deliver these touches. Return their number. Call it in a transaction.

    Raises:
        ErasureDelayed: one of them runs, or waits for further requests too. Its `cancel` cancels the others.
    """
    # A job without a payload has been emptied before.
    given = {"keys": list(delivery_keys), "words": []}
    cancel = partial(_cancel_jobs, f"{_OF_TOUCHES} AND payload <> '{{}}'", given)
    found, delayed = cancel()
    if delayed:
        raise ErasureDelayed(str(delayed), cancel)
    return _empty_jobs(found)


def erase_jobs_of_customer(who: Identity) -> int:
    """Empty the jobs and schedules that name the customer. Return their number.

    A job names it in its payload, its result or as a part of its `dedupe_key`. A schedule that does is disabled, also
    if a job delays the erasure. The customer's own jobs are cancelled in that case too.

    Raises:
        ErasureDelayed: one of the jobs runs, or waits for further requests whose key does not name the customer.
    """
    given = who.build_search()
    with transaction.atomic():
        # The arguments of schedules are JSON as an operator typed it.
        texts = {json.dumps(word, ensure_ascii=escape) for word in who.words for escape in (True, False)}
        named = (Q(args__contains=text) | Q(kwargs__contains=text) for text in texts)
        emptied = PeriodicTask.objects.filter(reduce(or_, named, Q(pk=None))).update(
            args="[]", kwargs="{}", enabled=False
        )
        if emptied:
            PeriodicTasks.update_changed()
        erased = int(emptied)
        found, delayed = _cancel_jobs(_NAMED, given)
        if not delayed:
            return erased + _empty_jobs(found)
    raise delayed


def _cancel_jobs(condition: str, given: dict[str, Any]) -> tuple[list[UUID], ErasureDelayed | None]:
    """Lock the jobs and cancel the waiting ones. Return all of them, and the reason if one must end first."""
    found = {task_id: stage for task_id, *stage in sql.rows(_FIND_JOBS.format(condition=condition), given)}
    waiting = [task_id for task_id, (state, _) in found.items() if state in ("scheduled", "queued")]
    own = [task_id for task_id in waiting if not found[task_id][1]]
    cancelled = job_ledger.cancel(own, reason=anonymization.REASON) if own else set()
    if len(cancelled) < len(waiting) or any(state == "running" for state, _ in found.values()):
        return list(found), ErasureDelayed("a job that names the customer runs, or waits for further requests too")
    return list(found), None


def _empty_jobs(task_ids: list[UUID]) -> int:
    """Empty payload, result, output, evidence and failed tasks of ended jobs. Return the number of jobs."""
    if task_ids:
        for statement in (_EMPTY_JOBS, _EMPTY_WINDOWS, _EMPTY_RUNS, _DELETE_EVIDENCE_OF_JOBS):
            sql.execute(statement, {"ids": list(task_ids)})
        anonymization.empty_failed_tasks(task_ids)
        anonymization.blank_log_entries(task_ids)
    return len(task_ids)


_KEY_NAMES = "regexp_split_to_array(dedupe_key, '[/|,;: ]+') && %(words)s::text[]"
_NAMED = f"""
({build_json_search("payload")} OR {build_json_search("result")} OR {_KEY_NAMES})
"""
# The newest job of a touch has its key. The jobs that it repeats delivered that touch too.
_OF_TOUCHES = """task_id IN (
    WITH RECURSIVE chain AS (
        SELECT task_id, retry_of FROM rpa_tasks_job WHERE touch_key = ANY(%(keys)b)
        UNION SELECT job.task_id, job.retry_of FROM rpa_tasks_job AS job JOIN chain ON job.task_id = chain.retry_of
    ) SELECT task_id FROM chain
)"""
_LATEST_JOBS = f"""
SELECT task_id FROM rpa_tasks_job WHERE {_OF_TOUCHES} OR {_NAMED} ORDER BY task_id DESC LIMIT %(most)s
"""  # noqa: S608 (made of constants)
# Requests whose key names the customer are all about this customer.
_FIND_JOBS = f"""
SELECT task_id, state, requests > 1 AND NOT {_KEY_NAMES} FROM rpa_tasks_job
WHERE {{condition}} ORDER BY task_id FOR NO KEY UPDATE
"""  # noqa: S608 (made of constants)
# The key of a request may name the customer. Its digest still groups the jobs of one key. The prefix marks the
# job as emptied, so that it is not published again without its payload.
_EMPTY_JOBS = f"""
UPDATE rpa_tasks_job SET payload = '{{}}', result = NULL, progress_message = '',
    dedupe_key = CASE WHEN starts_with(dedupe_key, '{ERASED_KEY}') THEN dedupe_key
                      ELSE '{ERASED_KEY}' || md5(dedupe_key) END
WHERE task_id = ANY(%(ids)b)
"""  # noqa: S608 (made of constants)
_EMPTY_WINDOWS = "DELETE FROM rpa_tasks_dedupewindow WHERE task_id = ANY(%(ids)b)"
_EMPTY_RUNS = "UPDATE rpa_tasks_run SET detail = '' WHERE job_id = ANY(%(ids)b)"
_DELETE_EVIDENCE_OF_JOBS = """
DELETE FROM rpa_tasks_evidence WHERE run_id IN (SELECT id FROM rpa_tasks_run WHERE job_id = ANY(%(ids)b))
"""
