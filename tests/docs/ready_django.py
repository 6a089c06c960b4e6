"""Run commands of manage.py in forks of one process, since each start of Django takes seconds of processor time.

`python -m tests.docs.ready_django serve SOCKET` waits for commands; `python tests/docs/ready_django.py SOCKET …` has
one run there, with its streams and exit status.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback


def serve(path: str) -> None:
    import manage

    sys.argv = ["manage.py", "check"]  # which imports what commands need
    manage.main()
    from django.db import connections

    connections.close_all()  # forks must not share one
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            client, _ = listener.accept()
            with client:
                if os.fork() == 0:
                    run(client)


def run(client: socket.socket) -> None:
    import manage

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    words, streams, _, _ = socket.recv_fds(client, 65536, 3)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    sys.argv = ["manage.py", *json.loads(words)]
    status = 0
    try:
        manage.main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    client.sendall(bytes([status]))
    os._exit(status)


def ask(path: str, words: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [json.dumps(words).encode()], [0, 1, 2])
        return server.recv(1)[0]


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    sys.exit(ask(sys.argv[1], sys.argv[2:]))
