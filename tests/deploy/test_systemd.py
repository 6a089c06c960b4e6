"""The units as systemd reads them. They are checked, not run: that needs a machine of its own."""

import re
import shutil
import subprocess
import sys
from configparser import RawConfigParser

import pytest
from cryptography.fernet import Fernet

from config.environment import ROOT, Environment
from config.settings.celery import CELERY_WORKER_SOFT_SHUTDOWN_TIMEOUT
from rpa_tasks.maintainer.process import STOP_WITHIN
from rpa_tasks.models import Flow
from rpa_tasks.worker.runner import STOP_TIME_LIMIT
from scheduling.delivery.outgoing import BATCH_DEADLINE
from scheduling.queue_names import CORE_QUEUES, RPA_QUEUES
from tests.support.tables import each_row

UNITS = ROOT / "deploy" / "systemd"
SERVICES = sorted(path.name for path in UNITS.glob("*.service"))
EXPOSED_AT_MOST = {"aftertouch-execution.service": 30}  # tenths; Chromium and bubblewrap make namespaces
ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(not ANALYZE, reason="missing service: systemd")


class Unit(RawConfigParser):
    """Keys may come more than once, and are case-sensitive."""

    def __init__(self, name):
        super().__init__(strict=False, delimiters=("=",), interpolation=None)
        self.read(UNITS / name)

    def optionxform(self, optionstr):
        return optionstr


@pytest.fixture
def installed(tmp_path):
    """The units as they would be if this checkout lay in /opt/aftertouch: systemd looks whether programs exist."""
    for path in UNITS.glob("aftertouch*"):
        text = path.read_text().replace("/opt/aftertouch/.venv/bin/python", sys.executable)
        name = path.name.replace("@.", "@touch.high.")
        (tmp_path / name).write_text(text.replace("/opt/aftertouch", str(ROOT)))
    return tmp_path


@needs_systemd
def test_systemd_verify_reports_no_problem(installed):
    units = sorted(str(path) for path in installed.iterdir())
    assert len(units) == len(SERVICES) + 1
    said = subprocess.run([str(ANALYZE), "verify", "--man=no", *units], capture_output=True, text=True)
    assert (said.returncode, said.stdout + said.stderr) == (0, "")


@needs_systemd
@each_row("name", SERVICES)
def test_systemd_exposure_is_below_limit(name, installed):
    unit = installed / name.replace("@.", "@touch.high.")
    limit = EXPOSED_AT_MOST.get(name, 15)
    words = [str(ANALYZE), "security", "--offline=true", f"--threshold={limit}", "--no-pager", str(unit)]
    said = subprocess.run(words, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout


@each_row("name", SERVICES)
def test_unit_has_what_all_units_need(name):
    service = Unit(name)["Service"]
    assert (service["Restart"], service["KillMode"], service["User"]) == ("always", "mixed", "aftertouch")
    assert Unit(name)["Unit"]["StartLimitIntervalSec"] == "0"
    # All of them are one user: what one of them removed at its end would be gone for the others.
    assert service.get("RemoveIPC", "no") == "no"
    # In its own user namespace a unit cannot see other processes if /proc hides them. It would take them for dead and
    # delete their counts.
    hides = service.get("ProtectProc", "default") != "default"
    assert not (hides and service.get("PrivateUsers", "no") != "no")
    assert (service["RuntimeDirectory"], service["RuntimeDirectoryPreserve"]) == ("aftertouch", "yes")
    assert read_example()["AFTERTOUCH_METRICS_DIR"] == "/run/aftertouch/metrics"


def test_execution_unit_prefetches_one_message_per_slot():
    """The setting for quorum queues is made for touches."""
    assert "--prefetch-multiplier=2" in Unit("aftertouch-execution.service")["Service"]["ExecStart"]


def test_stop_timeouts_of_units_exceed_the_longest_work():
    core = int(Unit("aftertouch-core.service")["Service"]["TimeoutStopSec"])
    assert core > BATCH_DEADLINE.total_seconds() + CELERY_WORKER_SOFT_SHUTDOWN_TIMEOUT

    timeout = Flow._meta.get_field("timeout").default.total_seconds()
    ended = timeout + 50 + STOP_WITHIN  # what must not be repeated is let finish, and killed 50 s after its timeout
    assert int(Unit("aftertouch-execution.service")["Service"]["TimeoutStopSec"]) > ended + STOP_TIME_LIMIT


def test_units_consume_all_queues():
    def queues(name):
        found = re.search(r"-Q (\S+)", Unit(name)["Service"]["ExecStart"])
        assert found
        return tuple(found[1].split(","))

    core = (queues(f"aftertouch-{name}.service") for name in ("core", "ticks", "long"))
    assert tuple(queue for found in core for queue in found) == CORE_QUEUES
    assert queues("aftertouch-execution.service") == RPA_QUEUES


def test_local_stack_programs_have_units():
    from config.local.stack import PROGRAMS

    assert {f"aftertouch-{program.name}.service" for program in PROGRAMS} <= set(SERVICES)


def test_example_environment_names_only_known_settings():
    known = {name.upper() for name in Environment.model_fields} | {"DJANGO_SETTINGS_MODULE", "FLOWER_BASIC_AUTH"}
    assert set(read_example()) | set(read_example("keys.example")) <= known
    texts = {unit: (UNITS / unit).read_text() for unit in SERVICES}
    unset = {
        (unit, name)
        for unit, text in texts.items()
        for name in re.findall(r"\$\{(\w+)\}", text)
        if name not in read_example() and f"\nEnvironment={name}=" not in text
    }
    assert unset == set(), "a unit expands what neither its environment nor the unit itself sets to nothing"


def test_example_environment_with_secrets_passes_deploy_checks(tmp_path):
    filled = read_example() | {
        "DJANGO_SECRET_KEY": "k" * 20 + "0123456789" * 4 + "!",
        "AFTERTOUCH_SECRETS_KEYS": Fernet.generate_key().decode(),
        "AFTERTOUCH_STATE_DIR": str(tmp_path),
    }
    words = [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"]
    said = subprocess.run(words, cwd=ROOT, env={"PATH": "/usr/bin:/bin", **filled}, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr


def test_execution_unit_reads_no_keys():
    """Keys are in one file, which all other units read; that of the metrics also starts without it."""
    assert set(read_example("keys.example")) == {"DJANGO_SECRET_KEY", "AFTERTOUCH_SECRETS_KEYS"}
    assert not set(read_example("keys.example")) & set(read_example())
    for name in SERVICES:
        text = (UNITS / name).read_text()
        reads = re.search(r"^EnvironmentFile=-?/etc/aftertouch/keys\.environment$", text, re.MULTILINE) is not None
        assert reads != (name == "aftertouch-execution.service"), name
        # A node without keys exports its metrics too.
        is_optional = "EnvironmentFile=-/etc/aftertouch/keys.environment" in text.splitlines()
        assert is_optional == (name == "aftertouch-metrics.service"), name
    assert Unit("aftertouch-execution.service")["Service"]["Environment"] == "AFTERTOUCH_ROLE=execution"


def test_execution_unit_allows_namespaces_for_bubblewrap():
    """It needs five kinds of namespaces, and a /proc of which nothing is covered."""
    service = Unit("aftertouch-execution.service")["Service"]
    assert {"user", "pid", "mnt", "ipc"} <= set(service["RestrictNamespaces"].split())
    for covers in ("ProtectKernelTunables", "ProtectKernelLogs", "ProtectHostname", "ProtectProc", "ProcSubset"):
        assert covers not in service, covers


def read_example(name="environment.example"):
    lines = (UNITS / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
