"""`python -m config.local.servers_cli start|stop|status` for the servers of this checkout."""

from __future__ import annotations

import argparse
import sys

from config.environment import Environment, environment
from config.local import servers
from config.local.endpoints import EmbeddedServerError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m config.local.servers_cli", description=__doc__)
    parser.add_argument("action", choices=["start", "stop", "status"])
    action = parser.parse_args().action
    try:
        {"start": start_command, "stop": stop_command, "status": print_server_status}[action](environment())
    except EmbeddedServerError as error:
        sys.exit(f"Aftertouch: {error}")


def start_command(settings: Environment) -> None:
    servers.start_servers(
        settings.aftertouch_state_dir, postgres=not settings.database_url, valkey=not settings.redis_url
    )
    print_server_status(settings)


def stop_command(settings: Environment) -> None:
    servers.stop_servers(settings.aftertouch_state_dir)


def print_server_status(settings: Environment) -> None:
    given = {"PostgreSQL": settings.database_url, "Valkey": settings.redis_url}
    for label, pid in servers.server_pids(settings.aftertouch_state_dir).items():
        found = "given by its URL" if given[label] else f"runs, pid {pid}" if pid else "does not run"
        sys.stdout.write(f"{label}: {found}\n")


if __name__ == "__main__":
    main()
