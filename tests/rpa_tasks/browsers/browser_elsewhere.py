"""A second real Chromium, which the pool does not own."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

from config.local.processes import select_port
from rpa_tasks.browsers import devtools
from rpa_tasks.browsers.chromium import FLAGS, find_chromium
from rpa_tasks.browsers.launch import LaunchSettings
from tests.support.waiting import eventually


class Elsewhere:
    """A browser that the company runs."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.port = port or select_port()  # not of the kernel's range: it stays free for a restart
        words = [
            find_chromium(),
            *FLAGS,
            "--no-sandbox",
            f"--remote-debugging-port={self.port}",
            f"--user-data-dir={folder}",
        ]
        self.process = subprocess.Popen([*words, "about:blank"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(self.answers, "it does not answer")
        self.launch = LaunchSettings(cdp_url=f"http://127.0.0.1:{self.port}")

    def answers(self) -> bool:
        with suppress(devtools.NoAnswer):
            return bool(devtools.websocket_path(self.port))
        return False

    def list_pages(self) -> list[str]:
        return [page.url for page in devtools.list_tabs(self.port)]
