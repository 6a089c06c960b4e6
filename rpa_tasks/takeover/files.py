"""Files of a take-over: keep them in the shop's profile, and exchange them with the operator."""

from __future__ import annotations

import asyncio
import base64
import errno
import os
import re
import shutil
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from django.conf import settings
from django.db import connection

from rpa_tasks import isolation
from rpa_tasks.browsers import registry
from rpa_tasks.browsers.chromium import MIN_FREE_BYTES
from rpa_tasks.models import TakeOver
from rpa_tasks.takeover.browser_view import BrowserView, FileChooser
from rpa_tasks.takeover.wire import FILES_LIMIT
from scheduling import sql
from scheduling.audit import record_action

log = structlog.get_logger(__name__)


# Keep the files of a take-over in a folder of the shop's profile, which the browser can read and write.
#
# The browser may do anything in its profile. So each file is opened below the folder's descriptor, without following
# links. The folder is deleted at the end of the take-over, and by the next maintainer if its process was killed.


PREFIX = ".take-over-"
MOST_UPLOADS = 1_000  #: of a take-over. Discarded ones count: their empty files stay until its end.
_DOWNLOAD = re.compile(r"[0-9A-Fa-f-]{1,36}")
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OPEN_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class IncomingFile:
    """A file that is being written. It stays open until a page gets it, so that `discard` can empty it."""

    path: str  #: as the browser sees it
    descriptor: int
    size: int  #: bytes
    received: int = 0  #: bytes

    @property
    def is_complete(self) -> bool:
        return self.received == self.size

    def append(self, content: bytes) -> None:
        """Raises `OSError`."""
        while content:
            written = os.write(self.descriptor, content)
            self.received += written
            content = content[written:]

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def discard(self) -> None:
        """Free the disk space. The empty file stays until the end of the take-over."""
        with suppress(OSError):
            if self.descriptor >= 0:
                os.ftruncate(self.descriptor, 0)
            self.close()


class KeptFiles:
    def __init__(self, profile: Path, take_over: int) -> None:
        self.folder = profile / f"{PREFIX}{take_over}"
        self._descriptor = -1
        self._owner: os.stat_result
        self._made = 0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Create the empty folder and delete it at the end. Raises `OSError`."""
        isolation.delete_directory(self.folder)
        root = os.open(self.folder.parent, _OPEN_FOLDER)
        try:
            self._owner = os.fstat(root)
            self._descriptor = self._create_folder(self.folder.name, root)
        finally:
            os.close(root)
        try:
            yield
        finally:
            os.close(self._descriptor)
            isolation.delete_directory(self.folder)

    def has_room(self, size: int) -> bool:
        """Return whether the disk has room for so many bytes beside what Chromium needs. Raises `OSError`."""
        return shutil.disk_usage(self._descriptor).free - size >= MIN_FREE_BYTES

    def create(self, name: str, size: int) -> IncomingFile:
        """Create an empty file with this name, which only the browser's user can read. Raises `OSError`."""
        if self._made >= MOST_UPLOADS:
            raise OSError(errno.EMFILE, "too many uploads")
        name = make_file_name(name)
        self._made += 1  # a folder for each file: two may have the same name
        folder = self._create_folder(f"upload-{self._made}", self._descriptor)
        try:
            made = self._open_for_browser(name, _CREATE, folder)
        finally:
            os.close(folder)
        return IncomingFile(str(self.folder / f"upload-{self._made}" / name), made, size)

    def read_download(self, download: str, offset: int, most: int) -> tuple[bytes, int]:
        """Return at most `most` bytes from the offset, and the size of the file.

        Raises `OSError`: it is no file that the browser has written.
        """
        if not _DOWNLOAD.fullmatch(download):
            raise FileNotFoundError(download)
        with open(os.open(download, _READ, dir_fd=self._descriptor), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid != self._owner.st_uid:
                raise PermissionError(download)
            file.seek(offset)
            return file.read(most), found.st_size

    def delete_download(self, download: str) -> None:
        """Delete the file. Idempotent."""
        if _DOWNLOAD.fullmatch(download):
            for name in (download, f"{download}.crdownload"):
                with suppress(OSError):
                    os.unlink(name, dir_fd=self._descriptor)

    def _create_folder(self, name: str, above: int) -> int:
        os.mkdir(name, 0o700, dir_fd=above)
        return self._open_for_browser(name, _OPEN_FOLDER, above)

    def _open_for_browser(self, name: str, flags: int, above: int) -> int:
        """Open a file or folder and give it to the browser's user. Raises `OSError`."""
        made = os.open(name, flags, 0o600, dir_fd=above)
        try:
            os.fchown(made, self._owner.st_uid, self._owner.st_gid)
        except OSError:
            os.close(made)
            raise
        return made


def make_file_name(given: str) -> str:
    """Return a name without folders and control characters, at most 200 bytes long. The end of a long name stays."""
    name = "".join(each for each in re.split(r"[/\\]", given)[-1] if each.isprintable()).strip()
    name = name.encode(errors="ignore")[-200:].decode(errors="ignore")
    return name if name.strip(".") else "file"


def delete_left_files() -> None:
    """Delete the files of take-overs whose process was killed. The caller is the only process that hosts them."""
    for folder in registry.profiles_dir().glob(f"*/{PREFIX}*"):
        isolation.delete_directory(folder)


# Exchange files between the operator who controls and the pages of a taken-over browser.
#
# A file travels in parts that name their place in it. The page of the operator repeats a part that was not confirmed,
# so a lost message or a new connection only delays it. A file that is larger than the limit is refused before its
# bytes. Each file is in the audit log before a page or the operator gets it. Its content is never in the database.


OUTGOING_PART = 131_072  #: bytes of a part of a download
WAITING_ACTIONS = 64  #: the page repeats what is dropped beyond

Notice = dict[str, Any]


class Refused(Exception):
    """The file cannot be exchanged. `problem` is a code that the page explains."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


@dataclass(slots=True)
class Upload:
    """The answer to one file chooser. A second attempt has another `token`."""

    chooser: int
    token: str
    files: dict[int, IncomingFile] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Return the bytes of all its files."""
        return sum(each.size for each in self.files.values())


@dataclass(slots=True)
class Download:
    id: str
    name: str
    size: int = 0  #: bytes; while it runs, of what is there
    state: str = "running"  #: running, done, cancelled or too_large
    recorded: bool = False


class FileExchange:
    def __init__(
        self, row: TakeOver, kept: KeptFiles, view: BrowserView, answer: Callable[[Notice], Awaitable[object]]
    ):
        """Prepare the exchange. `answer` publishes a notice to the connection that it names."""
        self._row, self._kept, self._view, self._answer = row, kept, view, answer
        self._actions: asyncio.Queue[dict[str, Any]] = asyncio.Queue(WAITING_ACTIONS)
        self._upload = Upload(0, "")
        self._uploaded = 0  #: bytes of files that pages may still read
        self._downloads: dict[str, Download] = {}
        self._limit: int = settings.AFTERTOUCH_RPA_TAKEOVER_FILES_MB * 2**20

    def describe(self) -> dict[str, Any]:
        """Return what the pages of operators show."""
        chooser = self._view.chooser
        listed = [{"id": each.id, "name": each.name, "size": each.size, "state": each.state}
                  for each in self._downloads.values()]  # fmt: skip
        asked = {"id": chooser.id, "multiple": chooser.multiple} if chooser else None
        return {"limit": self._limit, "chooser": asked, "downloads": listed}

    # --- actions of the operator --------------------------------------------------------------------------------

    def submit(self, action: dict[str, Any]) -> None:
        """Queue an action of the operator who controls. Does not block."""
        if not self._actions.full():
            self._actions.put_nowait(action)

    async def run(self) -> None:
        try:
            while True:
                action = await self._actions.get()
                try:
                    await self._carry_out(action)
                except Refused as refusal:
                    await self._refuse(action, refusal.problem)
                except OSError as error:
                    log.warning("take_over_file_failed", take_over=self._row.pk, error=type(error).__name__)
                    await self._refuse(action, "disk" if action["do"] == "upload" else "download_gone")
        finally:
            self._forget_upload()

    async def _carry_out(self, action: dict[str, Any]) -> None:
        match action["do"]:
            case "upload":
                await self._store_part(action)
            case "no_upload" if self._view.chooser and self._view.chooser.id == action["chooser"]:
                self._forget_upload()
                self._view.answer_chooser([])
            case "fetch":
                await self._send_part(action)
            case "fetched" if found := self._downloads.pop(action["id"], None):
                if found.state == "running":
                    self._view.cancel_download(found.id)
                self._kept.delete_download(found.id)
                self._view.on_change()

    async def _refuse(self, action: dict[str, Any], problem: str) -> None:
        if action["do"] == "upload":
            self._forget_upload()
        await self._answer({"type": "file_problem", "to": action["connection"], "problem": problem})

    # --- from the operator to a page ----------------------------------------------------------------------------

    async def _store_part(self, action: dict[str, Any]) -> None:
        chooser = self._view.chooser
        if chooser is None or chooser.id != action["chooser"] or (action["of"] > 1 and not chooser.multiple):
            raise Refused("chooser_gone")
        if (self._upload.chooser, self._upload.token) != (chooser.id, action["token"]):
            self._forget_upload()
            self._upload = Upload(chooser.id, action["token"])
        upload, number = self._upload, action["number"]
        if number not in upload.files:
            size = action["size"]
            if size > self._find_room() - upload.size or len(upload.files) >= FILES_LIMIT:
                raise Refused("too_large")
            if not self._kept.has_room(size):
                raise Refused("disk")
            upload.files[action["number"]] = self._kept.create(action["name"], size)
        file, content = upload.files[number], base64.b64decode(action["data"])
        if action["offset"] == file.received and not file.is_complete:
            if file.received + len(content) > file.size:
                raise Refused("too_large")
            file.append(content)
        notice = {"type": "upload", "token": upload.token, "number": number, "received": file.received}
        await self._answer({**notice, "to": action["connection"]})
        if len(upload.files) == action["of"] and all(each.is_complete for each in upload.files.values()):
            await self._give_files(chooser, upload)

    async def _give_files(self, chooser: FileChooser, upload: Upload) -> None:
        files = [upload.files[number] for number in sorted(upload.files)]
        for each in files:
            await self._record("file uploaded", each.path.rpartition("/")[2], each.received)
        if self._view.chooser != chooser:  # the page has gone while PostgreSQL answered
            raise Refused("chooser_gone")
        self._uploaded += upload.size
        self._upload = Upload(0, "")
        for each in files:
            each.close()
        self._view.answer_chooser([each.path for each in files])

    def _forget_upload(self) -> None:
        """Close and empty the files of an upload that does not go on."""
        upload, self._upload = self._upload, Upload(0, "")
        for each in upload.files.values():
            each.discard()

    # --- from a page to the operator ----------------------------------------------------------------------------

    def note_download(self, event: dict[str, Any]) -> None:
        """Note the beginning or the progress of a download, as DevTools reports it."""
        download = self._downloads.get(event["guid"])
        if "suggestedFilename" in event:
            if len(self._downloads) >= FILES_LIMIT:
                self._view.cancel_download(event["guid"])
                self._kept.delete_download(event["guid"])
                return
            self._downloads[event["guid"]] = Download(event["guid"], make_file_name(event["suggestedFilename"]))
        elif download and download.state == "running":
            self._note_progress(download, event)
        self._view.on_change()

    def _note_progress(self, download: Download, event: dict[str, Any]) -> None:
        download.size = int(event["receivedBytes"])
        expected = max(download.size, int(event["totalBytes"]))
        if expected > self._find_room() + download.size or event["state"] == "canceled":
            download.state = "cancelled" if event["state"] == "canceled" else "too_large"
            self._view.cancel_download(download.id)
            self._kept.delete_download(download.id)
            download.size = 0
        elif event["state"] == "completed":
            download.state = "done"

    async def _send_part(self, action: dict[str, Any]) -> None:
        download = self._downloads.get(action["id"])
        if download is None or download.state != "done":
            raise Refused("download_gone")
        content, size = self._kept.read_download(download.id, action["offset"], OUTGOING_PART)
        if size > self._limit:
            raise Refused("too_large")
        if not download.recorded:
            await self._record("file downloaded", download.name, size)
            download.recorded = True
        notice = {"type": "part", "id": download.id, "name": download.name, "size": size, "offset": action["offset"]}
        data = base64.b64encode(content).decode()
        await self._answer({**notice, "data": data, "to": action["connection"]})

    # --- both ---------------------------------------------------------------------------------------------------

    def _find_room(self) -> int:
        """Return how many bytes the take-over may still store."""
        return self._limit - self._uploaded - sum(each.size for each in self._downloads.values())

    async def _record(self, what: str, name: str, size: int) -> None:
        """Add the file to the audit log. Raises `Refused`."""

        def record() -> None:
            try:
                changes = [("file", None, name), ("bytes", None, size)]
                actor, label = self._row.username, str(self._row.shop)
                record_action("acted", self._row, label=label, actor=actor, reason=what, changes=changes)
            finally:
                connection.close()  # of the thread

        try:
            await asyncio.to_thread(record)
        except sql.UNAVAILABLE_ERRORS as error:
            log.warning("take_over_file_not_recorded", take_over=self._row.pk, error=type(error).__name__)
            raise Refused("not_recorded") from error
