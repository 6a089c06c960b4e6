"""`python -m config.local run [PROGRAM …]` and `stop`, for this checkout and its state directory."""

from __future__ import annotations

import argparse
import sys

from config.environment import environment
from config.local import foreground, ownership
from config.local.endpoints import EmbeddedServerError
from config.local.programs import PROGRAMS, StackError, select_programs


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m config.local", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", help="run in the foreground until Ctrl-C")
    run.add_argument("programs", nargs="*", help=f"only these of {', '.join(program.name for program in PROGRAMS)}")
    actions.add_parser("stop", help="stop what runs from this state directory, servers included")
    asked = parser.parse_args()
    settings = environment()
    try:
        if asked.action == "run":
            foreground.run_foreground(settings, select_programs(asked.programs))
        else:
            ownership.stop_stack(settings.aftertouch_state_dir)
    except (StackError, EmbeddedServerError) as error:
        sys.exit(f"Aftertouch: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
