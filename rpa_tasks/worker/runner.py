"""Run jobs one after another: pick, clean up, acquire a browser, run, collect evidence, judge, settle.

The command runs under a supervisor process. It ends the command unless it receives a lease renewal every few seconds.
So a worker that is stopped or cut off from PostgreSQL leaves no second run of the shop.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog
from django.conf import settings
from django.db import close_old_connections, connection
from django.db.models.functions import Now

from rpa_tasks import isolation
from rpa_tasks.browser_settings import resolve_launch_settings
from rpa_tasks.browsers import devtools, registry
from rpa_tasks.browsers.launch import BROWSER_FAILED, DISK_FULL, PROXY_FAILED, NoBrowser, is_disk_full
from rpa_tasks.browsers.pool import AcquiredBrowser, acquire_browser
from rpa_tasks.flow_sdk.discovery import FLOWS_VARIABLE
from rpa_tasks.jobs import wakeups
from rpa_tasks.jobs.dispatch import RunResult, settle_run
from rpa_tasks.jobs.ledger import Pick, job_ledger, renew_in_background
from rpa_tasks.models import Job, ParamStyle
from rpa_tasks.outcomes import CommandResult, ExitCause, RunOutcome, Verdict, judge
from rpa_tasks.supervisor import command
from rpa_tasks.supervisor.client import Progress, RunSpec, SupervisedCommand
from rpa_tasks.supervisor.protocol import clock
from rpa_tasks.supervisor.runs import LEASE_NO, SHOP, end_marked_processes
from rpa_tasks.worker.node import acquire_run_slot, stopping
from scheduling import sql

log = structlog.get_logger(__name__)
T = TypeVar("T")


PARAM_FILE = "param.json"


def make_run_directory(profile_id: str, lease_no: int, *, downloads: str = "", param: str | None = None) -> Path:
    """Create the working directory of one run, with `tmp`, the folder for downloads and the file of the parameter.

    Only the shop's programs can read it. Its browser can write beside it, so no link is followed. Raises `OSError`.
    """
    registry.shop_runs_dir(profile_id)
    folder = registry.run_path(profile_id, lease_no)
    isolation.delete_directory(folder)  # the browser may have made one
    owner = isolation.owner()
    folder.mkdir(mode=0o700)
    made = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in ("tmp", *([downloads] if downloads else ())):
            os.mkdir(name, 0o700, dir_fd=made)
            os.chown(name, owner, owner, dir_fd=made, follow_symlinks=False)
        if param is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(PARAM_FILE, flags, 0o600, dir_fd=made), "w", encoding="utf-8") as file:
                os.fchown(file.fileno(), owner, owner)
                file.write(param)
        os.fchown(made, owner, owner)  # last: until then no program of the shop changes it
    finally:
        os.close(made)
    return folder


SNAPSHOT_TIME_LIMIT = 15.0  #: seconds for the browser to export its page; a browser that hangs has no evidence
PIECE_LIMIT = 1_000_000  #: bytes of each item
UNPACKED_LIMIT = 4_000_000  #: bytes of an unpacked text; a few bytes of zlib can expand to gigabytes


def collect_evidence(port: int | None, log_path: Path) -> dict[str, bytes]:
    """Return the evidence by `Evidence.Kind`. Raises nothing: an item that cannot be read is missing."""
    found: dict[str, bytes] = {}
    if port:
        try:
            page = devtools.take_snapshot(port, timeout=SNAPSHOT_TIME_LIMIT, limit=PIECE_LIMIT)
        except devtools.NoAnswer as error:
            log.warning("evidence_not_saved", error=str(error)[:300])
        else:
            html = page.html.encode(errors="replace")[:PIECE_LIMIT]
            found = {"screenshot": page.screenshot, "html": zlib.compress(html)}
    try:
        text = log_path.read_bytes()[-PIECE_LIMIT:]
    except OSError:
        text = b""
    if text:
        found["log"] = zlib.compress(text)
    return found


def unpack_text(text: bytes) -> bytes:
    """Unpack at most 4 MB of a text that `collect_evidence` packed. Data that is not zlib is returned as it is."""
    try:
        return zlib.decompressobj().decompress(text, UNPACKED_LIMIT)
    except zlib.error:
        return text[:UNPACKED_LIMIT]


LEASE = timedelta(seconds=60)
RENEW_INTERVAL = 10.0  #: seconds between renewals; a run keeps its lease if two of them are lost
POLL_INTERVAL = 1.0  #: seconds between checks for a cancellation or a stop of the node
EXTENSION = 30.0  #: seconds that one renewal allows the supervisor process; it ends the command before the lease ends
STOP_TIME_LIMIT = 20.0  #: seconds that a run may continue when its node stops; then an idempotent run is returned
SETTLE_TIME_LIMIT = 50.0  #: seconds of retries while PostgreSQL is unavailable; then the rescue has settled it
NO_EVIDENCE_OUTCOMES = (RunOutcome.SUCCEEDED, RunOutcome.CANCELLED, RunOutcome.DEFERRED)  #: outcomes without evidence


def run_startable_jobs(queues: Sequence[str]) -> int:
    """Run startable jobs one after another and return their number.

    Returns 0 at once if all slots of the node are taken: their holders look for the next job when they finish.
    """
    ran = 0
    with acquire_run_slot() as number:
        while number is not None and not stopping[0]:
            pick = job_ledger.pick(queues, node=settings.AFTERTOUCH_NODE, lease=LEASE)
            if pick is None:
                break
            JobRun(pick).execute()
            ran += 1
            # The shop's next job may be in a queue that this node does not serve, or this node is stopping.
            wakeups.wake_for_shops([pick.shop_id])
    return ran


@dataclass(slots=True)
class JobRun:
    """One run. Each step continues the run or settles it."""

    pick: Pick
    started_at: datetime = field(init=False)
    renewed_at: float = field(default_factory=clock)
    claim_valid: bool = True
    settled: bool = False
    job: Job = field(init=False)
    browser: AcquiredBrowser | None = None
    may_have_started: bool = False  #: the command; nothing else of this claim starts one
    progress: Progress | None = None
    stopped_at: float = 0.0

    def execute(self) -> None:
        # A run that starts late is harmless: its command starts only after a renewal of the lease.
        rows = Job.objects.select_related("shop__platform", "flow__platform").annotate(at=Now())
        self.job = self._retry_outage(partial(rows.get, pk=self.pick.claim.task_id))
        self.started_at = self.job.at
        try:
            ended = self._run()
        except Exception as error:
            log.exception("run_execution_failed", task_id=str(self.job.pk))
            # PostgreSQL may be unavailable, so it is not asked whether the command has started.
            uncertain = self.may_have_started and not self.job.flow.idempotent
            outcome = RunOutcome.UNKNOWN if uncertain else RunOutcome.TRANSIENT
            ended = self._result_without_start(
                Verdict(outcome, "internal_error"), detail=f"{type(error).__name__}: {error}"
            )
        if not self.settled:
            self._settle(ended)

    # --- the steps ----------------------------------------------------------------------------------------------

    def _retry_outage(self, act: Callable[[], T]) -> T:
        """Return what `act` returns. While PostgreSQL is unavailable, retry for as long as the lease may be valid."""
        gives_up_at = time.monotonic() + SETTLE_TIME_LIMIT
        while True:
            try:
                return act()
            except sql.UNAVAILABLE_ERRORS as error:
                log.warning("run_waits_for_database", task_id=str(self.pick.claim.task_id), error=str(error))
                connection.close()
                if time.monotonic() > gives_up_at:
                    raise
                time.sleep(1)

    def _run(self) -> RunResult:
        # What an earlier run of this shop left on this node is ended first.
        shop, lease_no = self._shop_name(), self.pick.claim.lease_no
        if end_marked_processes(lambda marks: marks[SHOP] == shop and _lease_no_of(marks) < lease_no):
            return self._result_without_start(Verdict(RunOutcome.DEFERRED, "processes_left"))
        try:
            with self._acquire_browser():
                ended = self._execute_command()
                if self.claim_valid:
                    # Releasing the browser takes time. A worker that is killed during it must not lose the outcome. An
                    # uncertain browser is ended first.
                    self.settled = True
                    self._settle(ended)
                return ended
        except isolation.CannotIsolate as error:
            return self._result_without_start(Verdict(RunOutcome.DEFERRED, "not_isolated"), detail=str(error))
        except NoBrowser as error:
            failed = error.reason in (BROWSER_FAILED, PROXY_FAILED)
            outcome = RunOutcome.TRANSIENT if failed else RunOutcome.DEFERRED
            return self._result_without_start(Verdict(outcome, error.reason), detail=str(error))

    @contextmanager
    def _acquire_browser(self) -> Iterator[None]:
        if not self.job.flow.needs_browser:
            yield
            return
        with self._renew_during():
            self.browser = acquire_browser(
                self.job.shop.profile,
                self._shop_name(),
                wait=settings.AFTERTOUCH_RPA_BROWSER_WAIT,
                lease_no=self.pick.claim.lease_no,
                launch=resolve_launch_settings(self.job.shop),
            )
        dirty = True
        try:
            job_ledger.pin_to_node(self.pick, node=settings.AFTERTOUCH_NODE)
            yield
            dirty = not self.claim_valid
        finally:
            self.browser.release(dirty=dirty)
            # A download that had just started when it was deleted makes it again.
            isolation.delete_directory(registry.run_path(self.job.shop.profile, self.pick.claim.lease_no))

    def _execute_command(self) -> RunResult:
        flow, claim = self.job.flow, self.pick.claim
        with ExitStack() as prepared:
            try:
                order = self._build_run_spec(prepared)
            except command.CannotStart as error:
                return self._result_without_start(Verdict(RunOutcome.BUSINESS, error.reason), detail=str(error))
            except OSError as error:  # no working directory or no log
                reason = DISK_FULL if is_disk_full(error) else "not_started"
                return self._result_without_start(Verdict(RunOutcome.DEFERRED, reason), detail=str(error))
            if self.browser and flow.clear_cookies:  # a run that cannot start keeps the login
                self.browser.clear_cookies()
            if not self.renew_lease() or not job_ledger.mark_sending(claim):
                self.claim_valid = False
                return self._result_without_start(Verdict(RunOutcome.DEFERRED, "stale"))
            self.may_have_started = True
            ending = self._watch(order)
        verdict = judge(ending, exit_codes=flow.exit_codes, idempotent=flow.idempotent, needs_result=flow.needs_result)
        evidence: dict[str, bytes] = {}
        if verdict.outcome not in NO_EVIDENCE_OUTCOMES and self.claim_valid:
            with self._renew_during():
                evidence = collect_evidence(self.browser.port if self.browser else None, self._log_path())
        self.claim_valid = self.claim_valid and ending.ended == ExitCause.EXITED and not ending.survivors
        return RunResult(
            verdict=verdict,
            started_at=self.started_at,
            exit_code=ending.exit,
            detail=ending.tail or ending.error,
            result=ending.result,
            pool_wait=self.browser.waited if self.browser else None,
            warm=self.browser.warm if self.browser else None,
            evidence=evidence,
        )

    def _watch(self, order: RunSpec) -> CommandResult:
        """Wait until the command and everything it started has ended, and renew the lease during this time.

        If a renewal fails, the supervisor process ends the command.
        """
        looked_at = time.monotonic()
        with SupervisedCommand(replace(order, extend_until=self.renewed_at + EXTENSION)) as supervised:
            while True:
                event = supervised.next_event(timeout=POLL_INTERVAL)
                if isinstance(event, CommandResult):
                    if self.progress:
                        self._stop_reason()  # stores the last reported progress
                    return event
                if isinstance(event, Progress):
                    self.progress = event
                if clock() - self.renewed_at >= RENEW_INTERVAL and self.renew_lease():
                    supervised.extend(self.renewed_at + EXTENSION)
                if time.monotonic() - looked_at >= POLL_INTERVAL:
                    looked_at = time.monotonic()
                    if why := self._stop_reason():
                        supervised.stop(why)

    def _renew_during(self) -> AbstractContextManager[None]:
        """Renew the lease during a step that may take as long as the lease."""
        return renew_in_background(lambda: self.renew_lease() or self.claim_valid, interval=RENEW_INTERVAL)

    def renew_lease(self) -> bool:
        """Renew the lease. Returns False if the claim is stale or PostgreSQL is unavailable."""
        asked_at = clock()
        try:
            self.claim_valid = job_ledger.renew(self.pick.claim, lease=LEASE)
        except sql.UNAVAILABLE_ERRORS as error:
            log.warning("lease_not_renewed", task_id=str(self.job.pk), error=str(error))
            close_old_connections()
            return False
        if self.claim_valid:
            self.renewed_at = asked_at
        return self.claim_valid

    def _stop_reason(self) -> str:
        """Store the progress and return why the command must stop: cancelled, stale claim or stopping node; or ""."""
        if stopping[0]:
            self.stopped_at = self.stopped_at or time.monotonic()
            if self.job.flow.idempotent and time.monotonic() - self.stopped_at > STOP_TIME_LIMIT:
                return "node_stopping"
        try:
            progress = self.progress
            news = (progress.fraction, progress.message) if progress else ()
            cancelled = job_ledger.note_progress(self.pick.claim, *news)
        except sql.UNAVAILABLE_ERRORS:
            close_old_connections()
            return ""
        self.progress = None
        self.claim_valid = cancelled is not None
        return "" if cancelled is False else "cancelled"

    # --- the end ------------------------------------------------------------------------------------------------

    def _settle(self, ended: RunResult) -> None:
        """Settle the run. After a longer outage of PostgreSQL the rescue does."""

        def settle(given: RunResult) -> None:
            if settle_run(self.job, self.pick.claim, given):
                self._log_path().unlink(missing_ok=True)  # the run's row holds the relevant part

        with suppress(*sql.UNAVAILABLE_ERRORS):
            try:
                self._retry_outage(partial(settle, ended))
            except sql.UNAVAILABLE_ERRORS:
                raise
            except Exception:
                # Details that cannot be stored are dropped; the verdict still counts.
                log.exception("run_settlement_failed", task_id=str(self.job.pk))
                bare = RunResult(verdict=ended.verdict, started_at=ended.started_at)
                self._retry_outage(partial(settle, bare))

    def _result_without_start(self, verdict: Verdict, *, detail: str = "") -> RunResult:
        return RunResult(verdict=verdict, started_at=self.started_at, detail=detail)

    # --- parameter and environment ------------------------------------------------------------------------------

    def _build_run_spec(self, prepared: ExitStack) -> RunSpec:
        """Prepare the working directory and the sandbox. Closing `prepared` deletes the directory.

        Raises: `CannotStart`, `OSError`, `isolation.CannotIsolate`, `NoBrowser`.
        """
        flow, shop, claim = self.job.flow, self.job.shop, self.pick.claim
        # Forms and files refuse such a command, but a row written by hand or by an older release may have one.
        if problems := command.check_words(flow.command):
            raise command.CannotStart("command_not_valid", f"command: {'; '.join(problems)}")
        folder = registry.run_path(shop.profile, claim.lease_no)
        param = command.param_of(
            self.job.payload,
            nested=flow.param_style == ParamStyle.NESTED,
            debug_port=self.browser.port if self.browser else None,
            shop_id=shop.shop_id,
            platform=shop.platform.key,
            profile_id=shop.profile,
            task_id=str(self.job.pk),
            delivery_key=str(self.job.root_id),
            lease_no=claim.lease_no,
        )
        argv = command.argv_for(
            flow.command, flow=flow.name, param=param, timeout=flow.timeout, param_file=str(folder / PARAM_FILE)
        )
        prepared.callback(isolation.delete_directory, folder)
        make_run_directory(
            shop.profile,
            claim.lease_no,
            downloads=self.browser.download_folder if self.browser else "",
            param=command.param_text(param) if command.uses_placeholder(flow.command, "param_file") else None,
        )
        if self.browser:
            prepared.callback(self.browser.stop_downloads)  # before the directory is deleted
            self.browser.keep_downloads(folder / self.browser.download_folder)
        environment = self._build_environment(folder)
        cwd = flow.cwd or str(folder)
        # The folders of flows that the node names. They are mounted, so a flow's own `env` never counts.
        flow_folders = os.environ.get(FLOWS_VARIABLE, "") if FLOWS_VARIABLE in flow.environment else ""
        return RunSpec(
            argv=argv,
            env=environment,
            cwd=cwd,
            prefix=isolation.isolate_run(shop.profile, flow_folders.split(os.pathsep), cwd),
            timeout=flow.timeout.total_seconds(),
            extend_until=self.renewed_at + EXTENSION,
            log_path=str(self._log_path()),
            mask=command.secrets_in(environment),
        )

    def _build_environment(self, folder: Path) -> dict[str, str]:
        flow = self.job.flow
        environment = command.environment_for(
            task_id=str(self.job.pk),
            lease_no=self.pick.claim.lease_no,
            shop=self._shop_name(),
            home=isolation.home_dir(self.job.shop.profile),
            temporary=folder / "tmp",
            names=flow.environment,
            fixed=flow.env,
            path=flow.path,
        )
        if self.browser:
            environment["AFTERTOUCH_DOWNLOADS"] = str(folder / self.browser.download_folder)
        if flow.command[0] == "{python}":  # the flow runner of this project
            environment["PYTHONPATH"] = str(settings.BASE_DIR)
        return environment

    def _shop_name(self) -> str:
        return f"{self.job.shop.platform.key}/{self.job.shop.shop_id}"

    def _log_path(self) -> Path:
        return registry.browser_logs_dir() / f"{self.job.pk}-{self.pick.claim.lease_no}.log"


def _lease_no_of(marks: Mapping[str, str]) -> int:
    """Return the lease number in a process environment. A flow can set it to any value; no number counts as 0, so it is
    swept.
    """
    try:
        return int(marks[LEASE_NO] or 0)
    except ValueError:
        return 0
