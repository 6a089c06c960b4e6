"""One job after another, each through the same steps: pick → clear the way → borrow a browser → run → verdict → settle.

The command runs under a guard process that ends it unless it hears, every few seconds, that the lease was renewed. So
a worker that was stopped or cut off from the database leaves no second run beside the one that takes its place.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import structlog
from django.conf import settings
from django.db import close_old_connections, connection
from django.db.models.functions import Now

from rpa_tasks import isolation
from rpa_tasks.browsers import Borrowed, NoBrowser, borrow, registry
from rpa_tasks.flow_sdk.discovery import VARIABLE as FLOWS
from rpa_tasks.jobs import wakeups
from rpa_tasks.jobs.pick import Pick, jobs
from rpa_tasks.jobs.settle import Ended, conclude
from rpa_tasks.models import Job
from rpa_tasks.outcomes import Ended as How
from rpa_tasks.outcomes import Ending, Outcome, Verdict, judge
from rpa_tasks.supervisor import command, processes
from rpa_tasks.supervisor.client import Guarded, Order, Progress, sweep
from rpa_tasks.supervisor.clock import clock
from rpa_tasks.supervisor.markers import SWEEP_GRACE
from rpa_tasks.worker.evidence import collect
from rpa_tasks.worker.node import slot, stopping
from scheduling import sql
from scheduling.ledger.transitions import Claim

log = structlog.get_logger(__name__)

LEASE = timedelta(seconds=60)
RENEW = 10.0  #: seconds between renewals
LOOK = 1.0  #: seconds between looks whether somebody called it off or the node is stopping
EXTENSION = 30.0  #: seconds that a renewal is worth to the guard; its whole ladder ends before the lease does
STOPPING_PATIENCE = 20.0  #: seconds a run may go on when its node stops, before an idempotent one is sent back
SETTLE_PATIENCE = 50.0  #: seconds of trying to settle while the database is away; then the rescue has done it
UNEVENTFUL = (Outcome.SUCCEEDED, Outcome.CANCELLED, Outcome.HELD)  #: ends that nobody looks into


def work(queues: Sequence[str]) -> int:
    """Run what can start, one job after another, until nothing can. Returns how many ran. At once 0 where all of this
    node's slots are taken: who holds them looks for the next job anyway."""
    ran = 0
    with slot() as number:
        while number is not None and not stopping.is_set():
            pick = jobs.pick(queues, node=settings.AFTERTOUCH_NODE, lease=LEASE, ageing=settings.AFTERTOUCH_RPA_AGEING)
            if pick is None:
                break
            _Run(pick).carry_out()
            ran += 1
            # What waits behind it may be in a queue that this node does not carry, or this node is stopping.
            wakeups.ring_for_shops([pick.shop_id])
    return ran


@dataclass(slots=True)
class _Run:
    """One run on its way. Each step either hands on or settles."""

    pick: Pick
    started_at: datetime = field(init=False)
    renewed_at: float = field(default_factory=clock)
    stands: bool = True
    settled: bool = False
    job: Job = field(init=False)
    browser: Borrowed | None = None
    progress: Progress | None = None
    stopped_at: float = 0.0

    def carry_out(self) -> None:
        rows = Job.objects.select_related("shop__platform", "flow__platform").annotate(at=Now())
        self.job = rows.get(pk=self.pick.claim.task_id)
        self.started_at = self.job.at
        try:
            ended = self._run()
        except Exception as error:
            log.exception("run_broke", task_id=str(self.job.pk))
            ended = self._broke(error)
        if not self.settled:
            self._settle(ended)

    # --- the steps ----------------------------------------------------------------------------------------------

    def _run(self) -> Ended:
        if reason := self._way_is_blocked():
            return self._without_start(Verdict(Outcome.HELD, reason))
        try:
            with self._borrowed():
                ended = self._with_browser()
                if self.stands:
                    # Giving the browser back takes time, and a worker that is killed meanwhile must not lose this end.
                    # A browser in doubt is ended first.
                    self.settled = True
                    self._settle(ended)
                return ended
        except isolation.CannotIsolate as error:
            return self._without_start(Verdict(Outcome.HELD, "not_isolated"), detail=str(error))
        except NoBrowser as error:
            outcome = Outcome.TRANSIENT if error.reason == "browser_failed" else Outcome.HELD
            return self._without_start(Verdict(outcome, error.reason), detail=str(error))

    def _way_is_blocked(self) -> str:
        """What an earlier run of this shop left on this node ends before the next begins."""
        shop = self._shop_name()
        left = sweep(
            lambda marks: marks.get("AFTERTOUCH_SHOP") == shop and _lease_no(marks) < self.pick.claim.lease_no,
            spares=isolation.uids_of_others(self.job.shop.profile),
        )
        if not left and isolation.mode() == isolation.UID:
            uids = {isolation.uid_of(self.job.shop.profile)}
            left = [each.pid for each in processes.end(lambda: isolation.left_by_runs(uids), SWEEP_GRACE)]
        return "processes_left" if left else ""

    @contextmanager
    def _borrowed(self) -> Iterator[None]:
        if not self.job.flow.needs_browser:
            yield
            return
        with self._lease_kept():
            self.browser = borrow(
                self.job.shop.profile,
                self._shop_name(),
                wait=settings.AFTERTOUCH_RPA_BROWSER_WAIT,
                lease_no=self.pick.claim.lease_no,
            )
        jobs.settle_down(self.pick, node=settings.AFTERTOUCH_NODE)
        dirty = True
        try:
            yield
            dirty = not self.stands
        finally:
            self.browser.give_back(dirty=dirty)

    def _with_browser(self) -> Ended:
        flow, claim = self.job.flow, self.pick.claim
        if self.browser and flow.clear_cookies:
            self.browser.clear_cookies()
        with ExitStack() as prepared:
            try:
                order = self._order(prepared)
            except command.ParamTooLong as error:
                return self._without_start(Verdict(Outcome.BUSINESS, "arguments_too_long"), detail=str(error))
            except OSError as error:  # no room for a home, or for the log
                return self._without_start(Verdict(Outcome.HELD, "disk_full"), detail=str(error))
            if not self._renew() or self.job.pk not in jobs.mark_sending([claim]):
                self.stands = False
                return self._without_start(Verdict(Outcome.HELD, "stale"))
            ending = self._watch(order)
        verdict = judge(ending, exit_codes=flow.exit_codes, idempotent=flow.idempotent, needs_result=flow.needs_result)
        evidence: dict[str, bytes] = {}
        if verdict.outcome not in UNEVENTFUL and self.stands:
            with self._lease_kept():
                evidence = collect(self.browser.port if self.browser else None, self._log_path())
        self.stands = self.stands and ending.ended == How.EXITED and not ending.survivors
        return Ended(
            verdict=verdict,
            started_at=self.started_at,
            exit_code=ending.exit,
            detail=ending.tail or ending.error,
            result=ending.result,
            pool_wait=self.browser.waited if self.browser else None,
            evidence=evidence,
        )

    def _watch(self, order: Order) -> Ending:
        """Until the command and everything it started is gone. The lease is renewed meanwhile, and the guard told so;
        where it cannot be, the guard ends the command by itself."""
        looked_at = time.monotonic()
        with Guarded(replace(order, extend_until=self.renewed_at + EXTENSION)) as guarded:
            while True:
                event = guarded.next_event(timeout=LOOK)
                if isinstance(event, Ending):
                    if self.progress:
                        self._why_stop()  # the last that it told is not lost
                    return event
                if isinstance(event, Progress):
                    self.progress = event
                if clock() - self.renewed_at >= RENEW and self._renew():
                    guarded.extend(self.renewed_at + EXTENSION)
                if time.monotonic() - looked_at >= LOOK:
                    looked_at = time.monotonic()
                    if why := self._why_stop():
                        guarded.stop(why)

    @contextmanager
    def _lease_kept(self) -> Iterator[None]:
        """Around what may take as long as the lease and has no turn of its own to renew it in."""
        over = threading.Event()

        def renew() -> None:
            while not over.wait(RENEW) and self._renew():
                pass
            connection.close()

        keeper = threading.Thread(target=renew, name="lease", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            over.set()
            keeper.join()

    def _renew(self) -> bool:
        """False: the lease could not be renewed, because the claim does not stand or nobody can be asked."""
        asked_at = clock()
        try:
            self.stands = jobs.renew(self.pick.claim, lease=LEASE)
        except sql.AWAY as error:
            log.warning("lease_not_renewed", task_id=str(self.job.pk), error=str(error))
            close_old_connections()
            return False
        if self.stands:
            self.renewed_at = asked_at
        return self.stands

    def _why_stop(self) -> str:
        """Whether somebody called it off, the claim is gone or the node is stopping; progress goes along."""
        if stopping.is_set():
            self.stopped_at = self.stopped_at or time.monotonic()
            if self.job.flow.idempotent and time.monotonic() - self.stopped_at > STOPPING_PATIENCE:
                return "node_stopping"
        try:
            seen = _look(self.pick.claim, self.progress)
        except sql.AWAY:
            close_old_connections()
            return ""
        self.progress = None
        self.stands = seen is not None
        return "" if seen is False else "cancelled"

    # --- the end ------------------------------------------------------------------------------------------------

    def _settle(self, ended: Ended) -> None:
        """Where the database is away, for as long as the lease may still stand."""
        gives_up_at, bare = time.monotonic() + SETTLE_PATIENCE, False
        while True:
            try:
                if conclude(self.job, self.pick.claim, ended):
                    self._log_path().unlink(missing_ok=True)  # what matters of it is with the run
                return
            except sql.AWAY as error:
                log.warning("run_not_settled", task_id=str(self.job.pk), error=str(error))
                connection.close()
                if time.monotonic() > gives_up_at:
                    return
                time.sleep(1)
            except Exception:
                if bare:
                    raise
                # Whatever it said that cannot be kept: what it means still counts.
                log.exception("end_broke", task_id=str(self.job.pk))
                ended, bare = Ended(verdict=ended.verdict, started_at=ended.started_at), True

    def _without_start(self, verdict: Verdict, *, detail: str = "") -> Ended:
        return Ended(verdict=verdict, started_at=self.started_at, detail=detail)

    def _broke(self, error: Exception) -> Ended:
        """A fault of ours. Whether the command had begun decides, as with a worker that vanished."""
        began = Job.objects.filter(pk=self.job.pk, sending_at__isnull=False).exists()
        outcome = Outcome.UNKNOWN if began and not self.job.flow.idempotent else Outcome.TRANSIENT
        return self._without_start(Verdict(outcome, "internal_error"), detail=f"{type(error).__name__}: {error}")

    # --- what the command is told -------------------------------------------------------------------------------

    def _param(self) -> dict[str, Any]:
        shop = self.job.shop
        return command.param_of(
            debug_port=self.browser.port if self.browser else None,
            shop_id=shop.shop_id,
            platform=shop.platform.key,
            profile_id=shop.profile,
            task_id=str(self.job.pk),
            delivery_key=str(self.job.root_id),
            lease_no=self.pick.claim.lease_no,
            payload=self.job.payload,
        )

    def _order(self, prepared: ExitStack) -> Order:
        """With a working directory that is deleted, and a sandbox that is taken down, when `prepared` is closed. Raises
        `ParamTooLong`, `OSError` and `isolation.CannotIsolate`."""
        flow, shop, claim = self.job.flow, self.job.shop, self.pick.claim
        folder = registry.runs() / f"{self.job.pk}-{claim.lease_no}"
        param_file = folder / "param.json"
        argv = command.argv_for(
            flow.command, flow=flow.name, param=self._param(), timeout=flow.timeout, param_file=str(param_file)
        )
        prepared.callback(isolation.delete_directory, folder)
        isolation.make_run_directory(shop.profile, folder)
        if command.uses_param_file(flow.command):
            isolation.store_file(shop.profile, param_file, command.param_text(self._param()))
        environment = command.environment_for(
            task_id=str(self.job.pk),
            lease_no=claim.lease_no,
            shop=self._shop_name(),
            home=isolation.home(shop.profile),
            temporary=folder / "tmp",
            names=flow.environment,
            path=flow.path,
        )
        plan = prepared.enter_context(
            isolation.plan_for_run(
                shop.profile,
                folder,
                reads=environment.get(FLOWS, "").split(os.pathsep),
                port=self.browser.port if self.browser else None,
            )
        )
        if flow.command[0] == "{python}":  # our own flow runner, which lives here
            environment["PYTHONPATH"] = str(settings.BASE_DIR)
        return Order(
            argv=argv,
            env=environment,
            cwd=str(folder),
            prefix=plan.prefix,
            confine=plan.confine,
            timeout=flow.timeout.total_seconds(),
            log_path=str(self._log_path()),
            mask=command.secrets_in(environment),
        )

    def _shop_name(self) -> str:
        return f"{self.job.shop.platform.key}/{self.job.shop.shop_id}"

    def _log_path(self) -> Path:
        folder = Path(settings.AFTERTOUCH_STATE_DIR) / "rpa" / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{self.job.pk}-{self.pick.claim.lease_no}.log"


def _look(claim: Claim, progress: Progress | None) -> bool | None:
    """Whether a person called the run off; None where the claim does not stand any more. Stores the progress."""
    found = sql.rows(
        """
        UPDATE rpa_tasks_job
        SET progress = %(progress)s, progress_message = %(message)s
        WHERE task_id = %(id)s AND state = 'running' AND lease_no = %(lease_no)s
        RETURNING cancel_requested_at IS NOT NULL
        """
        if progress
        else """
        SELECT cancel_requested_at IS NOT NULL FROM rpa_tasks_job
        WHERE task_id = %(id)s AND state = 'running' AND lease_no = %(lease_no)s
        """,
        {"id": claim.task_id, "lease_no": claim.lease_no}
        | ({"progress": progress.fraction, "message": progress.message} if progress else {}),
    )
    return bool(found[0][0]) if found else None


def _lease_no(marks: Mapping[str, str]) -> int:
    """Of a process, by its environment, which a flow can set to anything: what is no number is swept."""
    try:
        return int(marks.get("AFTERTOUCH_LEASE_NO") or 0)
    except ValueError:
        return 0
