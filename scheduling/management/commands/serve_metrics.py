"""Serve metrics over HTTP: `manage.py serve_metrics`."""

from __future__ import annotations

import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser
from django.db import connections
from prometheus_client import CONTENT_TYPE_LATEST

from scheduling.monitoring import collectors
from scheduling.monitoring.multiprocess import share_metrics


class Command(BaseCommand):
    help = (
        "Serve the process metrics of this node at /metrics, for any host name. "
        "With --cluster also the cluster metrics, which are the same on every node."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--port", type=int, default=settings.AFTERTOUCH_METRICS_PORT, help="(%(default)s)")
        parser.add_argument("--address", default=settings.AFTERTOUCH_METRICS_ADDRESS, help="(%(default)s)")
        parser.add_argument(
            "--cluster", action="store_true", default=settings.AFTERTOUCH_METRICS_CLUSTER,
            help="also export cluster metrics from PostgreSQL, the broker and Redis",
        )  # fmt: skip

    def handle(self, *args: Any, **options: Any) -> None:
        share_metrics()
        server = ThreadingHTTPServer((options["address"], options["port"]), _make_metrics_handler(options["cluster"]))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        self.stdout.write(f"http://{options['address']}:{server.server_port}/metrics", ending="\n")
        self.stdout.flush()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def _make_metrics_handler(cluster: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                return self.send_error(404)
            try:
                text = collectors.export_node_metrics() + (collectors.export_cluster_metrics() if cluster else b"")
            finally:
                connections.close_all()  # each response has its own thread
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
            return None

        def log_message(self, format: str, *args: Any) -> None:
            """Do not log scrapes."""

    return Handler
