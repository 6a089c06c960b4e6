"""Run the scenarios and print the table: `python -m benchmarks [names…] [--quick]`."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

import psycopg
import redis

from benchmarks.environment import Bench, open_bench
from benchmarks.results import describe_machine
from config.local.reaper import bounded_run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help="scenarios to run (default: all)")
    parser.add_argument("--quick", action="store_true", help="one repetition of a small size, as a smoke test")
    parser.add_argument("--repeat", type=int, default=0, help="repetitions of each measurement (5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the generated data (default: from the clock)")
    parser.add_argument("--state-dir", type=Path, help="directory for data and logs of servers (default: temporary)")
    parser.add_argument("--broker", default="", help="URL of a running broker, such as amqp://… (default: Valkey)")
    parser.add_argument("--ended", type=int, default=0, help="ended touches of `volume` (2,000,000)")
    arguments = parser.parse_args()
    seed = arguments.seed or int(time.time()) % 1_000_000
    repeat = arguments.repeat or (1 if arguments.quick else 5)
    with (
        bounded_run(),
        open_bench(
            seed=seed,
            repeat=repeat,
            quick=arguments.quick,
            state_dir=arguments.state_dir,
            broker=arguments.broker,
            ended=arguments.ended,
        ) as bench,
    ):
        from benchmarks.scenarios import SCENARIOS

        unknown = set(arguments.names) - SCENARIOS.keys()
        if unknown:
            parser.error(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
        print(about := describe_machine(seed, _describe_servers(bench)), flush=True)
        broken = _run_scenarios(bench, arguments.names or list(SCENARIOS))
        print(f"\n{about}, {repeat} repetitions\n\n{bench.figures.table()}")
    for name in broken:
        print(f"\n{name} did not end; see above.", file=sys.stderr)
    return 1 if broken else 0


def _run_scenarios(bench: Bench, names: list[str]) -> list[str]:
    """Run the scenarios. Returns those that failed; the others keep their figures."""
    from benchmarks.scenarios import SCENARIOS

    broken = []
    for name in names:
        print(f"\n{name}", flush=True)
        try:
            SCENARIOS[name](bench)
        except Exception:
            traceback.print_exc()
            broken.append(name)
    return broken


def _describe_servers(bench: Bench) -> list[str]:
    with psycopg.connect(bench.endpoints.database_url) as connection:
        postgres = connection.info.server_version // 10_000
    with redis.Redis.from_url(bench.endpoints.redis_url, decode_responses=True) as client:
        info = client.info("server")
    return [f"PostgreSQL {postgres}", f"Valkey {info.get('valkey_version', info['redis_version'])}"]


if __name__ == "__main__":
    sys.exit(main())
