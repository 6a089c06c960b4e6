"""One folder for the processes of a node."""

import fcntl
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from prometheus_client import values

from config.environment import ROOT
from scheduling.monitoring import multiprocess

COUNT = """
import sys
from prometheus_client import Counter, Gauge
Counter("done", "…", ["what"]).labels("work").inc(float(sys.argv[1]))
Gauge("alive", "…", ["kind"], multiprocess_mode="livesum").labels("worker").set(1)
Gauge("seen_at", "…", ["kind"], multiprocess_mode="max").labels("worker").set(7)
print("done", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def counting(tmp_path):
    """Two processes that have counted and live."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    words = [sys.executable, "-c", COUNT]
    found = [
        subprocess.Popen(
            [*words, count], cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for count in ("2", "3")
    ]
    for each in found:
        assert each.stdout
        assert each.stdout.readline() == "done\n"
    return found


def end(process):
    process.kill()
    process.communicate()


def read_process_metrics(folder):
    lines = multiprocess.export_process_metrics(folder).decode().splitlines()
    return sorted(line for line in lines if not line.startswith("#"))


def test_ended_process_keeps_counts_and_drops_gauges(tmp_path, counting):
    first, second = counting
    try:
        assert read_process_metrics(tmp_path) == [
            'alive{kind="worker"} 2.0',
            'done_total{what="work"} 5.0',
            'seen_at{kind="worker"} 7.0',
        ]
        end(first)
        assert 'alive{kind="worker"} 1.0' in read_process_metrics(tmp_path)
        assert 'done_total{what="work"} 5.0' in read_process_metrics(tmp_path)
        assert not list(tmp_path.glob(f"*_{first.pid}.db"))
    finally:
        end(first)
        end(second)
    assert read_process_metrics(tmp_path) == ['done_total{what="work"} 5.0']
    assert read_process_metrics(tmp_path) == ['done_total{what="work"} 5.0']  # nothing is added up twice


def test_reused_pid_counts_as_ended_process(tmp_path, counting):
    for process in counting:
        end(process)
    for path in tmp_path.glob(f"*_{counting[0].pid}.db"):
        path.rename(path.with_name(path.name.replace(str(counting[0].pid), "1")))  # the first process of the machine
    for path in tmp_path.glob("*_1.db"):
        os.utime(path, (0, 0))  # last written before that one started
    assert read_process_metrics(tmp_path) == ['done_total{what="work"} 5.0']


def test_damaged_total_is_set_aside_and_unfinished_file_deleted(tmp_path):
    spoiled = (64).to_bytes(4, "little") + bytes(4) + (40).to_bytes(4, "little") + b"\xff" * 200
    (tmp_path / "counter_gone.db").write_bytes(spoiled)
    (tmp_path / "counter_999999999.db").touch()
    assert read_process_metrics(tmp_path) == []
    assert (tmp_path / "counter_gone.db.spoiled").read_bytes() == spoiled
    assert not (tmp_path / "counter_999999999.db").exists()


@pytest.fixture
def starting(tmp_path, settings, monkeypatch):
    """A process that has not shared anything yet, and its folder."""
    settings.AFTERTOUCH_METRICS_DIR = tmp_path / "metrics"
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")
    (tmp_path / "metrics").mkdir()
    return tmp_path / "metrics"


def shared(folder):
    return os.environ["PROMETHEUS_MULTIPROC_DIR"] == str(folder)


def test_merge_failure_does_not_stop_start(starting, monkeypatch):
    def fail(_):
        raise RuntimeError("spoiled")

    monkeypatch.setattr(multiprocess, "merge_ended_processes", fail)
    multiprocess.share_metrics()
    assert not shared(starting)


def test_little_disk_space_disables_sharing(starting, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=multiprocess.MIN_FREE_BYTES - 1))
    multiprocess.share_metrics()
    assert not shared(starting)


def test_held_lock_or_foreign_file_does_not_stop_start(starting, monkeypatch):
    monkeypatch.setattr(multiprocess, "START_LOCK_TIMEOUT", 0.1)
    (starting / "counter_copy.db").touch()  # of another program
    (starting / "counter_999999999.db").touch()
    with (starting / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        multiprocess.share_metrics()
    assert shared(starting)
    assert (starting / "counter_999999999.db").exists()
    multiprocess.share_metrics()
    assert shared(starting)
    assert (starting / "counter_copy.db").exists()


def test_held_lock_ends_reading_with_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr(multiprocess, "READ_LOCK_TIMEOUT", 0.1)
    with (tmp_path / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError):
            multiprocess.export_process_metrics(tmp_path)
    assert multiprocess.export_process_metrics(tmp_path) == b""
