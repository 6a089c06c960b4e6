"""Keep the files of a take-over in a folder of the shop's profile, which the browser can read and write.

The browser may do anything in its profile. So each file is opened below the folder's descriptor, without following
links. The folder is deleted at the end of the take-over, and by the next maintainer if its process was killed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rpa_tasks import isolation
from rpa_tasks.browsers import registry
from rpa_tasks.browsers.chromium import MIN_FREE_BYTES

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
            made = os.open(name, _CREATE, 0o600, dir_fd=folder)
            os.fchown(made, self._owner.st_uid, self._owner.st_gid)
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
        made = os.open(name, _OPEN_FOLDER, dir_fd=above)
        os.fchown(made, self._owner.st_uid, self._owner.st_gid)
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
