from __future__ import annotations

import argparse
import socket
import sys

from aiohttp import web

from examples.demo_shop.market import Market
from examples.demo_shop.site import HOST, build_site


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo_shop", description="A marketplace to try flows on.")
    parser.add_argument("--port", type=int, default=8765, help="port; 0 selects a free one (default: 8765)")
    parser.add_argument("--orders", type=int, default=45, help="initial orders of a shop (default: 45)")
    parser.add_argument("--messages", type=int, default=5, help="initial messages of buyers in a shop (default: 5)")
    order = parser.parse_args(words)
    try:
        listener = socket.create_server((HOST, order.port))
    except OSError as error:
        sys.stderr.write(f"Port {order.port} cannot be had: {error.strerror}\n")
        return 1
    sys.stdout.write(f"Demo market: http://{HOST}:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    market = Market(orders=order.orders, messages=order.messages)
    web.run_app(build_site(market), sock=listener, print=None, access_log=None, shutdown_timeout=1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
