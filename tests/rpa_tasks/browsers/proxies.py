"""A proxy with a password, and a page that shows the visitor's address."""

from __future__ import annotations

import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

#: Of this process only: tests beside this one run proxies, too, and one searches all processes for them.
USER, PASSWORD = f"buyer-{os.getpid()}", f"geheim:ö-{os.getpid()}"
SOURCE = "127.0.0.2"


class Echo(BaseHTTPRequestHandler):
    """Show the visitor's address; `/file` is a download, `/size` the length of what was posted."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        text = f"<p>You are {self.client_address[0]}</p>".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("X-Languages", self.headers.get("Accept-Language", ""))
        if self.path == "/file":
            self.send_header("Content-Disposition", "attachment; filename=orders.csv")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = str(len(body)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


class ProxyProcess:
    def __init__(self, kind: str, source: str = SOURCE) -> None:
        script = str(Path(__file__).with_name("proxy_process.py"))
        self.process = subprocess.Popen(
            [sys.executable, script, kind, USER, PASSWORD, source], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        self.url = f"{kind}://127.0.0.1:{self.process.stdout.readline().strip()}"

    def read_targets(self) -> list[str]:
        """End the proxy and return what it was asked for."""
        self.process.kill()
        return self.process.communicate()[0].split()
