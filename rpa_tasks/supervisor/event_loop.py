"""Event loop of the supervisor process.

It forwards the command's output, and ends the command at its timeout or the end of its lease. It ends the command's
descendants before it reports. The lease makes a second run of a shop safe. A runner that is cut off or stopped sends no
extension. So the command has ended before another node may start one, whatever the runner assumes.
"""

from __future__ import annotations

import os
import select

from rpa_tasks.supervisor import processes
from rpa_tasks.supervisor.output import OutputReader, decode_tail
from rpa_tasks.supervisor.protocol import Inbox, Outbox, clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from types import FrameType
    from typing import Any
else:
    import _signal as signal  # `signal` imports enum: 4 ms

NEVER = float("inf")
#: Only the command gets the first SIGTERM, so that it can use its children for an orderly end. They get theirs after
#: this share of the grace, or as soon as the command has ended.
COMMAND_ONLY_SHARE = 1 / 3
#: Seconds that processes left by a command have after its end.
LEFTOVER_SECONDS = 2.0
POLL_SECONDS = 0.05
#: Below bwrap: its init, then the command.
SANDBOX_DEPTH = 2


class SupervisorLoop:
    """One run of one command."""

    def __init__(self, order: dict[str, Any], early_lines: list[dict[str, Any]], inbox: Inbox, outbox: Outbox) -> None:
        """`early_lines` arrived together with the order."""
        self.order, self.early_lines, self.inbox, self.outbox = order, early_lines, inbox, outbox
        self.reader = OutputReader(order["log_path"], order["mask"], outbox)
        self.lease_until: float = order["extend_until"]
        self.timeout_at: float = clock() + order["timeout"]
        self.pid = 0
        self.status: int | None = None  # of the command, after its end
        self.ended = ""  # why it was asked to end; empty while it may run
        self.lease_lost = False
        self.spread_at = self.kill_at = self.give_up_at = NEVER
        self.leftovers_asked = False  # to end, after the end of the command
        self.childless = False  # this process adopts its orphaned descendants, so then none is left
        self.stop_requested = False  # the supervisor process received SIGTERM
        self.asking = False  # whether to wake up when the runner has read
        self.poll = select.poll()

    def run(self) -> dict[str, Any]:
        """Run the command and return the last event. All its processes have ended then, except the number in
        `survivors`.
        """
        processes.adopt_orphans()
        wake = wake_on_signals(self)
        try:
            self.start()
        except processes.NotStarted as failure:
            self.reader.finish()
            reason, sentence = failure.args
            return {**self.report(), "ended": "not_started", "error": reason, "tail": sentence}
        self.outbox.send_event({"started": self.pid})
        self.poll.register(wake, select.POLLIN)
        self.poll.register(self.inbox.descriptor, select.POLLIN)
        self.handle_lines(self.early_lines)
        while not self.childless and clock() < self.give_up_at:
            self.turn(wake)
        self.reader.finish()
        return self.report()

    def start(self) -> None:
        """Start the command unless its lease is over.

        A runner that was stopped between claim and order sends an expired one; another node may run the shop already.
        """
        if clock() >= self.lease_until:
            raise processes.NotStarted("lease_lost", "The lease expired before the command started.")
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        try:
            self.pid = processes.start_command(self.order, (out_end, err_end))
        finally:
            os.close(out_end)
            os.close(err_end)
        self.reader.attach(out, err)
        self.poll.register(out, select.POLLIN)
        self.poll.register(err, select.POLLIN)

    def turn(self, wake: int) -> None:
        """Wait for the next event or deadline, at most a second: poll does not count the sleep of the machine."""
        if self.outbox.waits != self.asking:
            self.asking = self.outbox.waits
            if self.asking:
                self.poll.register(self.outbox.descriptor, select.POLLOUT)
            else:
                self.poll.unregister(self.outbox.descriptor)
        timers = [clock() + 1, self.outbox.due_at() or NEVER, self.spread_at, self.kill_at]
        if not self.ended and self.status is None:
            timers += [self.lease_until, self.timeout_at]
        for descriptor, _ in self.poll.poll(max(0.0, min(timers) - clock()) * 1000 + 1):
            if descriptor in self.reader:
                self.reader.read_available(descriptor)
                if descriptor not in self.reader:
                    self.poll.unregister(descriptor)
            elif descriptor == self.inbox.descriptor:
                self.handle_lines(self.inbox.receive())
            elif descriptor == wake:
                os.read(wake, 512)
                self.reap()
            else:
                self.outbox.push()
        self.outbox.release(clock())
        self.check_deadlines()

    def handle_lines(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if "extend_until" in line:
                self.lease_until = line["extend_until"]
            if "stop" in line:
                self.stop(line["stop"], self.order["grace"])
        if self.inbox.closed:
            self.poll.unregister(self.inbox.descriptor)
            self.stop("runner_lost", self.order["grace"])

    def reap(self) -> None:
        """Reap the command and adopted orphans."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.childless = True
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status = status

    def stop(self, why: str, grace: float) -> None:
        """Send SIGTERM, then SIGKILL after `grace` seconds. A second reason can only shorten the grace."""
        now = clock()
        self.kill_at = min(self.kill_at, now + grace)
        if self.ended or self.status is not None:
            return
        self.ended = why
        self.spread_at = now + min(grace, self.order["grace"]) * COMMAND_ONLY_SHARE
        command = self.command()
        processes.terminate([command] if command else [])

    def check_deadlines(self) -> None:
        now = clock()
        if self.stop_requested:
            self.stop("node_stopping", self.order["grace"])
        if now >= self.lease_until and not self.lease_lost:
            self.lease_lost = True
            self.stop("lease_lost", self.order["grace"])
            # After a freeze the end of the lease may be long past and another node may serve the shop: the grace counts
            # once.
            self.kill_at = min(self.kill_at, self.lease_until + self.order["grace"])
        if now >= self.timeout_at:
            self.timeout_at = NEVER
            self.stop("timeout", self.order["hard_after"])
        if self.status is not None and not self.leftovers_asked:
            self.leftovers_asked = True
            self.spread_at = now
            self.kill_at = min(self.kill_at, now + LEFTOVER_SECONDS) if not self.ended else self.kill_at
        if self.childless:
            return
        if now >= self.spread_at:
            self.spread_at = NEVER
            processes.terminate(self.terminable())
        if now >= self.kill_at:
            self.give_up_at = min(self.give_up_at, now + processes.PROOF_SECONDS)
            self.kill_at = now + POLL_SECONDS
            processes.kill(processes.list_descendants(os.getpid()))

    def terminable(self) -> list[processes.Process]:
        """Return the processes to terminate: without the sandbox's own ones while its command runs."""
        family = processes.list_descendants(os.getpid())
        command = self.command() if self.order["prefix"] and self.status is None else None
        own = {self.pid, command.parent} if command and command.pid != self.pid else set()
        return [each for each in family if each.pid not in own]

    def command(self) -> processes.Process | None:
        """Return the process that gets the first SIGTERM.

        It is below the two processes of a sandbox, the first of which ends all others with it.
        """
        found = processes.read_process(self.pid)
        for _ in range(SANDBOX_DEPTH if self.order["prefix"] else 0):
            below = [each for each in processes.all_processes() if found and each.parent == found.pid]
            found = min(below, key=lambda each: (each.started, each.pid), default=found)
        return found

    def report(self) -> dict[str, Any]:
        code = os.waitstatus_to_exitcode(self.status) if self.status is not None else None
        return {
            "exit": code if code is not None and code >= 0 else None,
            "signal": -code if code is not None and code < 0 else None,
            "ended": self.ended or "exited",
            "error": self.reader.error,
            "survivors": 0 if self.childless else len(processes.list_descendants(os.getpid())),
            "tail": decode_tail(self.reader.tail),
        }


def wake_on_signals(loop: SupervisorLoop) -> int:
    """Wake the loop on SIGCHLD. SIGTERM means that the node stops; the runner handles interrupts."""
    wake, waker = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waker, False)

    def end(number: int, frame: FrameType | None) -> None:
        loop.stop_requested = True

    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, end)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    return wake


def main() -> None:
    inbox, outbox = Inbox(0), Outbox(1)
    lines: list[dict[str, Any]] = []
    while not lines and not inbox.closed:
        lines = inbox.receive()
    os.set_blocking(inbox.descriptor, False)
    if lines:
        order, *early_lines = lines
        outbox.send_last_event(SupervisorLoop(order, early_lines, inbox, outbox).run(), inbox)
    os._exit(0)
