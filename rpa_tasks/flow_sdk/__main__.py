from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rpa_tasks.flow_sdk import cli, discovery
from rpa_tasks.flow_sdk.flow import Misused


def main(words: list[str]) -> int:
    order = _build_flow_parser().parse_args(words)
    if order.what == "run":
        return cli.run_flow(order.flow, order.param, order.timeout)
    try:
        return {"new": _create_flow, "try": _try_flow, "list": _print_flows}[order.what](order)
    except Misused as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def _print_flows(order: argparse.Namespace) -> int:
    for name, description, path in discovery.list_flows():
        sys.stdout.write(f"{name:<28} {description}  ({path})\n")
    return 0


def _create_flow(order: argparse.Namespace) -> int:
    path = cli.write_starter(order.name, order.to)
    sys.stdout.write(f"Wrote {path}\n")
    if not cli.is_on_search_path(path):
        sys.stdout.write(f"It is found after: {cli.search_path_command(path)}\n")
    return 0


def _try_flow(order: argparse.Namespace) -> int:
    from rpa_tasks.flow_sdk import cli  # its imports would delay each run of the workers

    return cli.try_flow(
        order.flow,
        shop=order.shop,
        payload=order.payload,
        timeout=order.timeout,
        profile=order.profile,
        show=order.show,
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """Print the usage and exit with the status of `Misused`."""
        self.print_usage(sys.stderr)
        self.exit(Misused.exit_code, f"{self.prog}: {message}\n")


def _parse_seconds(word: str) -> float:
    seconds = float(word)
    if not 0 < seconds <= 86_400:
        raise ValueError
    return seconds


_parse_seconds.__name__ = "number of seconds between 0 and 86400"


def _build_flow_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m rpa_tasks.flow_sdk", description="Runs flows: Python files with a run(flow).")
    commands = parser.add_subparsers(dest="what", required=True)
    run = commands.add_parser("run", help="run a flow as workers do")
    run.add_argument("--param", required=True, help="JSON: shop_id, debug_port, …, members of the payload")
    attempt = commands.add_parser("try", help="run a flow by hand in a new browser")
    attempt.add_argument("--shop", default="s1", help="the shop id (default: s1)")
    attempt.add_argument("--payload", default="{}", help="JSON (default: {})")
    attempt.add_argument("--profile", type=Path, help="keep the browser's profile, with its logins, in this directory")
    attempt.add_argument("--show", action="store_true", help="show the browser window, and leave it open")
    for each in (run, attempt):
        each.add_argument("--flow", required=True, help="name of its file, without .py")
        each.add_argument("--timeout", type=_parse_seconds, default=600.0, help="seconds (default: 600)")
    new = commands.add_parser("new", help="write the file of a new flow")
    new.add_argument("name")
    new.add_argument("--to", type=Path, help=f"the directory (default: the first of {discovery.FLOWS_VARIABLE})")
    commands.add_parser("list", help="list flows")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
