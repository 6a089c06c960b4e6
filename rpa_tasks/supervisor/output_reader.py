"""Read the output of the command into log and tail, and forward its messages to the runner."""

from __future__ import annotations

import os

from rpa_tasks.supervisor.output import Lines, Mask, Tail, parse_message, progress_in
from rpa_tasks.supervisor.protocol import Outbox
from rpa_tasks.supervisor.rotating_log import RotatingLog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CHUNK = 65_536
#: A pipe whose writers are dead holds no more chunks; a surviving process could fill it forever.
DRAINED_CHUNKS = 64


class OutputReader:
    """The two streams of a command, merged line by line in the order of reading."""

    def __init__(self, order: dict[str, Any], outbox: Outbox) -> None:
        self.log = RotatingLog(order["log_path"], order["log_limit"])
        self.tail = Tail()
        self.error = ""  # why its result was rejected
        self._mask = Mask(order["mask"])
        self._outbox = outbox
        self._streams: dict[int, Lines] = {}
        self._message_stream = -1
        self._has_result = False

    def attach(self, output: int, errors: int) -> None:
        """Start reading both streams. Only standard output may contain messages to the runner."""
        self._message_stream = output
        for descriptor in (output, errors):
            os.set_blocking(descriptor, False)
            self._streams[descriptor] = Lines(self._mask)

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._streams

    def read_available(self, descriptor: int) -> bool:
        """Read once. Returns False if there was nothing to read; closes and removes a stream at its end."""
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._note(descriptor, *self._streams[descriptor].feed(data))
        else:
            self._note(descriptor, *self._streams.pop(descriptor).finish())
            os.close(descriptor)
        return bool(data)

    def finish(self) -> None:
        """Read the rest of the pipes, including lines without a final newline."""
        for descriptor in list(self._streams):
            for _ in range(DRAINED_CHUNKS):
                if not self.read_available(descriptor):
                    break
            if descriptor in self._streams:
                self._note(descriptor, *self._streams[descriptor].finish())
        self.log.finish()

    def _note(self, descriptor: int, shown: bytes, messages: list[bytes], lost_result: bool) -> None:
        self.log.write(shown)
        self.tail.add(shown)
        if descriptor != self._message_stream:
            return
        if lost_result:
            self._report_error("result_too_long")
        for line in messages:
            try:
                self._forward_messages(line)
            except Exception:  # no output of a command may end the supervisor process
                self._not_readable(line)

    def _forward_messages(self, line: bytes) -> None:
        value = parse_message(line, self._mask)
        if value is None or ("result" in value and not isinstance(value["result"], dict)):
            self._not_readable(line)
        elif "result" in value and not self._has_result:
            self._has_result, self.error = True, ""
            self._outbox.send_event({"result": value["result"]})
        elif progress := progress_in(value):
            self._outbox.progress(progress)

    def _not_readable(self, line: bytes) -> None:
        if b'"result"' in line[:64]:
            self._report_error("result_not_readable")

    def _report_error(self, error: str) -> None:
        if not self._has_result:
            self.error = error
