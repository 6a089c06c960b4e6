"""The command of these flows: logs its start, its end, and live processes of other runs of its shop.

Its payload: `log` is the file; `hold` the seconds it takes, or `until` a file it waits for; `fail_once` lets the first
run of a task end with 70; `stubborn` ignores SIGTERM; `brood` leaves a process behind in a session of its own; `write`
stores its lease number in a table at the end, unless a higher one is there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time


def main() -> int:
    param = json.loads(sys.argv[1])
    payload = param
    log = os.open(payload["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(what: str, **more: object) -> None:
        line = {
            "what": what, "shop": param["shop_id"], "task": param["task_id"], "key": param["delivery_key"],
            "lease": param["lease_no"], "pid": os.getpid(), "at": time.monotonic(), **more,
        }  # fmt: skip
        os.write(log, json.dumps(line).encode() + b"\n")  # one call, so that lines of many do not mix

    if payload.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if payload.get("brood"):
        start_daemon()
    note("began", met=list_other_run_processes(), sequel=payload.get("sequel"))
    wait(payload)
    if payload.get("write"):
        note("wrote", stored=write(param))
    if payload.get("fail_once") and first_time(f"{payload['log']}.{param['task_id']}"):
        note("ended")
        return 70
    note("ended")
    print(json.dumps({"result": {"lease": param["lease_no"]}}), flush=True)
    return 0


def wait(payload: dict[str, object]) -> None:
    until = payload.get("until")
    if until is None:
        time.sleep(float(str(payload.get("hold", 0))))
        return
    gives_up_at = time.monotonic() + 240
    while not os.path.exists(str(until)) and time.monotonic() < gives_up_at:
        time.sleep(0.02)


def list_other_run_processes() -> list[int]:
    """Processes of this shop that belong to another run of it, on whatever node of this machine."""
    shop, lease = (f"{name}={os.environ[name]}".encode() for name in ("AFTERTOUCH_SHOP", "AFTERTOUCH_LEASE_NO"))
    met = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if shop in words and lease not in words:
            met.append(int(pid))
    return met


def start_daemon() -> None:
    """Become a daemon: leave the group, session and parent."""
    if os.fork():
        return
    os.setsid()
    if os.fork() == 0:
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        os.execv("/bin/sleep", ["sleep", "240"])
    os._exit(0)


def first_time(mark: str) -> bool:
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def write(param: dict[str, object]) -> bool:
    """As a flow of our users would: late writers are refused by the table itself."""
    import psycopg

    with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
        cursor = connection.execute(
            "INSERT INTO rpa_tasks_demowatermark AS mark (shop_id, position, lease_no) VALUES (%s, 1, %s)"
            " ON CONFLICT (shop_id) DO UPDATE SET position = mark.position + 1, lease_no = excluded.lease_no"
            " WHERE mark.lease_no <= excluded.lease_no",
            [param["shop_id"], param["lease_no"]],
        )
        return cursor.rowcount == 1


if __name__ == "__main__":
    sys.exit(main())
