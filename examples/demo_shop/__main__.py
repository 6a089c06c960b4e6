from __future__ import annotations

import argparse
import signal
import sys
import threading

from examples.demo_shop.market import Market
from examples.demo_shop.site import Server


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo_shop", description="A marketplace to try flows on.")
    parser.add_argument("--port", type=int, default=8765, help="port; 0 selects a free one (default: 8765)")
    parser.add_argument("--orders", type=int, default=45, help="initial orders of a shop (default: 45)")
    parser.add_argument("--messages", type=int, default=5, help="initial messages of buyers in a shop (default: 5)")
    order = parser.parse_args(words)
    try:
        server = Server(Market(orders=order.orders, messages=order.messages), order.port)
    except OSError as error:
        sys.stderr.write(f"Port {order.port} cannot be had: {error.strerror}\n")
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        # From a separate thread: `shutdown` waits for the loop that the signal interrupted.
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    sys.stdout.write(f"Demo market: {server.url}\n")
    sys.stdout.flush()
    server.serve_forever(poll_interval=0.1)
    server.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
