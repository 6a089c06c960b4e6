"""A flow that attacks its node gets nothing of the application or of other shops, as root and as an ordinary user."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from config.environment import ROOT, environment
from rpa_tasks import isolation
from tests.support.chromium import find_chromium

pytestmark = pytest.mark.timeout(600)  # two browsers start, and a flow reads all files below /tmp
HERE = Path(__file__).parent
ORDINARY = 61_234  #: a uid without an account


@pytest.fixture(scope="module", params=("root", "ordinary"))
def hostile_results(request):
    """What a hostile flow got on a node of root, and of an ordinary user."""
    find_chromium()
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("only root can try what root and others do")
    if not shutil.which("bwrap"):
        pytest.skip("missing service: bubblewrap")
    folder = Path(tempfile.mkdtemp(prefix="node-"))
    words = [sys.executable, str(HERE / "node.py"), _without_password(environment().postgres)]
    if request.param == "ordinary" and os.geteuid() == 0:
        os.chown(folder, ORDINARY, ORDINARY)
        words = [sys.executable, str(HERE / "unprivileged.py"), str(ORDINARY), *words]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False,
        env={
            "PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(ROOT),
            "AFTERTOUCH_STATE_DIR": str(folder), "DJANGO_SETTINGS_MODULE": "config.settings.local",
            "AFTERTOUCH_RPA_ISOLATION": isolation.BUBBLEWRAP,
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["isolated"], told["exit"]) == (True, 0), told["ending"]
    yield told["got"]
    shutil.rmtree(folder, ignore_errors=True)


def _without_password(url):
    parts = urlsplit(url)
    return f"postgresql://{parts.username}@{parts.hostname}:{parts.port}{parts.path}"


def test_hostile_flow_reaches_only_files_of_its_shop(hostile_results):
    assert hostile_results["uid"] != 0
    assert (hostile_results["environments"], hostile_results["files"]) == ([], [])
    assert hostile_results["passwords"].startswith("PermissionError")
    assert hostile_results["other_profile"].startswith("FileNotFoundError")
    assert hostile_results["state"] == ["rpa"]
    assert (hostile_results["ptrace"], hostile_results["ptrace_worker"]) == (-1, -1)
    assert hostile_results["kill"].startswith(("ProcessLookupError", "PermissionError"))
    assert "fe_sendauth: no password" in hostile_results["database"]
    assert "ERR_FILE_NOT_FOUND" in hostile_results["file_by_browser"]
    assert "ERR_" in hostile_results["environ_by_browser"]

    assert "Chrom" in hostile_results["our_port"]
    assert (
        hostile_results["our_page"],
        hostile_results["our_profile"],
        hostile_results["our_folder"],
        hostile_results["our_home"],
    ) == ("here", True, 4, 4)
    assert set(hostile_results["our_variables"]) <= {"PATH", "HOME", "TMPDIR", "PYTHONPATH", "PWD", "LC_CTYPE"}
