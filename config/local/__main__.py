"""`python -m config.local run [PROGRAM …]`, `servers` and `stop`, for this checkout and its state directory."""

from __future__ import annotations

import argparse
import sys

from config.environment import environment
from config.local import servers, stack
from config.local.endpoints import EmbeddedServerError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m config.local", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", help="run in the foreground until Ctrl-C")
    run.add_argument("programs", nargs="*", help=f"only these of {', '.join(each.name for each in stack.PROGRAMS)}")
    actions.add_parser("servers", help="start the servers only")
    actions.add_parser("stop", help="stop all programs and servers of this state directory")
    asked = parser.parse_args()
    settings = environment()
    state_dir = settings.aftertouch_state_dir
    try:
        if asked.action == "run":
            stack.run_foreground(settings, stack.select_programs(asked.programs))
        elif asked.action == "stop":
            stack.stop_stack(state_dir)
        else:
            given = {"PostgreSQL": settings.database_url, "Valkey": settings.redis_url}
            servers.start_servers(state_dir, postgres=not given["PostgreSQL"], valkey=not given["Valkey"])
            for label, pid in servers.server_pids(state_dir).items():
                sys.stdout.write(f"{label}: {'given by its URL' if given[label] else f'runs, pid {pid}'}\n")
    except (stack.StackError, EmbeddedServerError, OSError) as error:
        sys.exit(f"Aftertouch: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
