"""The form of what describes containers, and what of it needs no engine; test_compose.py starts them."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import chdir
from functools import partial
from pathlib import Path

import psutil
import yaml

from config.environment import ROOT, Environment
from config.local.processes import command_line_of, is_alive, select_port, wait_until
from tests.deploy.test_scraping import has_series
from tests.faults.brokers import Server
from tests.support.tables import each_row
from tests.support.waiting import WAIT_LIMIT

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFESTS = [
    (path.name, document)
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
WITH_METRICS = ["sh", "deploy/with_metrics.sh"]
PORT = Environment.model_fields["aftertouch_metrics_port"].default
SILENT = {"migrate", "flower"}  #: what counts nothing
SERVICE_KEYS = {
    "build", "cap_drop", "command", "depends_on", "env_file", "environment", "healthcheck", "image", "init", "ports",
    "read_only", "restart", "security_opt", "shm_size", "stop_grace_period", "tmpfs", "ulimits", "user", "volumes",
}  # fmt: skip


@each_row("name", COMPOSE["services"])
def test_compose_service_uses_only_known_keys(name):
    service = COMPOSE["services"][name]
    assert set(service) <= SERVICE_KEYS
    assert all(isinstance(word, str) for word in service.get("command", []))
    for other, state in service.get("depends_on", {}).items():
        assert other in COMPOSE["services"]
        waits_for = state["condition"]
        assert waits_for != "service_healthy" or "healthcheck" in COMPOSE["services"][other]
    for volume in service.get("volumes", []):
        source = volume.split(":")[0]
        assert (DEPLOY / source).is_dir() if source.startswith("./") else source in COMPOSE["volumes"]
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:"), "only the proxy speaks to the outside"


def test_container_commands_match_units():
    for name in ("core", "ticks", "long", "execution", "beat", "watcher"):
        unit = (DEPLOY / "systemd" / f"aftertouch-{name}.service").read_text()
        words = _plain(shlex.split(re.findall(r"^ExecStart=\S+ (.*)$", unit, re.MULTILINE)[0].replace("%%", "%")))
        assert _plain(COMPOSE["services"][name]["command"]) == words
        assert _plain(_container(name)["command"]) == words


def _plain(words):
    """Without the number of processes, without how Python is called, and without what is beside it."""
    words = words[len(WITH_METRICS) :] if words[: len(WITH_METRICS)] == WITH_METRICS else words
    words = words[: words.index("-c")] + words[words.index("-c") + 2 :] if "-c" in words else list(words)
    return [word for word in words if word not in ("-m", "python")]


def _container(name):
    return _pod(name)["containers"][0]


def _pod(name):
    (found,) = [each for _, each in MANIFESTS if each["kind"] == "Deployment" and each["metadata"]["name"] == name]
    return found["spec"]["template"]["spec"]


def test_metrics_folder_is_in_memory_and_not_shared():
    """Two containers' process ids are the same numbers."""
    for name in ("web", "core", "ticks", "long", "execution", "beat", "watcher"):
        assert any(each.startswith("/run/aftertouch:") for each in COMPOSE["services"][name]["tmpfs"])
        (folder,) = [each for each in _container(name)["volumeMounts"] if each["mountPath"] == "/run/aftertouch"]
        (volume,) = [each for each in _pod(name)["volumes"] if each["name"] == folder["name"]]
        assert volume["emptyDir"]["medium"] == "Memory"
    assert "AFTERTOUCH_METRICS_DIR=/run/aftertouch/metrics" in (DEPLOY / "Dockerfile").read_text()


def test_each_counting_container_serves_its_own_metrics():
    """Web exports only its own counts. Without the others, alerts would report that no worker and no beat runs."""
    services = {name: each for name, each in COMPOSE["services"].items() if each["image"].startswith("aftertouch")}
    deployments = {each["metadata"]["name"]: each for _, each in MANIFESTS if each["kind"] == "Deployment"}
    counting = set(services) - SILENT
    assert set(deployments) == counting
    for name in counting:
        container = _container(name)
        for command in (services[name]["command"], container["command"]):
            assert command[:2] == WITH_METRICS, name
        assert {"name": "metrics", "containerPort": PORT} in container["ports"], name
    assert services["web"]["environment"]["AFTERTOUCH_METRICS_CLUSTER"] == "true"
    assert {"name": "AFTERTOUCH_METRICS_CLUSTER", "value": "true"} in _container("web")["env"]


def test_with_metrics_restarts_exporter_and_passes_sigterm(tmp_path):
    port = select_port()
    env = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "DJANGO_SETTINGS_MODULE": "config.settings.local",
        "AFTERTOUCH_METRICS_PORT": str(port), "AFTERTOUCH_STATE_DIR": str(tmp_path),
        "AFTERTOUCH_METRICS_DIR": str(tmp_path / "metrics"), "AFTERTOUCH_METRICS_ADDRESS": "127.0.0.1",
    }  # fmt: skip
    script = Server([*WITH_METRICS, "sleep", "600"], tmp_path / "container.log", env)
    with chdir(ROOT), script.standing():
        assert script.process
        answers = partial(has_series, f"127.0.0.2:{port}", "core-1:9102")
        assert wait_until(answers, WAIT_LIMIT, pause=0.2), script.log.read_text()
        main = psutil.Process(script.process.pid)
        assert main.cmdline() == ["sleep", "600"]
        (serving,) = [each for each in main.children(recursive=True) if "serve_metrics" in command_line_of(each)]
        serving.kill()
        assert wait_until(lambda: not is_alive(serving), WAIT_LIMIT)
        assert wait_until(answers, WAIT_LIMIT, pause=0.2), script.log.read_text()
        assert main.is_running()
        main.terminate()
        assert script.process.wait(WAIT_LIMIT) == -signal.SIGTERM


def test_web_trusts_only_the_named_proxies():
    for command in (COMPOSE["services"]["web"]["command"], _container("web")["command"]):
        assert "AFTERTOUCH_TRUSTED_PROXIES" in command[command.index("--forwarded-allow-ips") + 1]
        assert "--proxy-headers" in command
    assert ":?" in COMPOSE["services"]["web"]["command"][-1]
    (variable,) = [each for each in _container("web")["env"] if each["name"] == "AFTERTOUCH_TRUSTED_PROXIES"]
    assert "optional" not in variable["valueFrom"]["secretKeyRef"]


def test_compose_commands_contain_no_password():
    for name, service in COMPOSE["services"].items():
        words = [*service.get("command", []), *service.get("healthcheck", {}).get("test", [])]
        assert not [word for word in words if "PASSWORD" in word or "AUTH" in word], name


def test_compose_programs_have_own_redis_users():
    users = {
        line.split()[1] for line in (DEPLOY / "redis" / "users.acl").read_text().splitlines() if line[:5] == "user "
    }
    redis = COMPOSE["services"]["redis"]
    assert redis["command"][:2] == ["sh", "/etc/aftertouch/with_users.sh"]
    assert "./redis:/etc/aftertouch:ro" in redis["volumes"]
    for name, service in COMPOSE["services"].items():
        if "REDIS_URL" in service.get("environment", {}):
            user = {"migrate": "web", "ticks": "core", "long": "core"}.get(name, name)
            assert service["environment"]["REDIS_URL"].startswith(f"redis://{user}:"), name
            assert user in users


def test_execution_containers_get_no_keys_and_name_isolation():
    for name, service in COMPOSE["services"].items():
        if service["image"].startswith("aftertouch"):
            assert ("keys.environment" in service["env_file"]) == (name != "execution"), name
    execution = COMPOSE["services"]["execution"]["environment"]
    assert (execution["AFTERTOUCH_ROLE"], execution["AFTERTOUCH_RPA_ISOLATION"]) == ("execution", "bubblewrap")

    workloads = [each for _, each in MANIFESTS if each["kind"] in ("Deployment", "Job")]
    for workload in workloads:
        pod = workload["spec"]["template"]["spec"]
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            secrets = {source["secretRef"]["name"] for source in container["envFrom"]}
            assert ("aftertouch-keys" in secrets) == (workload["metadata"]["name"] != "execution")
    variables = {each["name"]: each.get("value") for each in _container("execution")["env"]}
    assert variables == {"AFTERTOUCH_ROLE": "execution", "AFTERTOUCH_RPA_ISOLATION": "none"}


def test_containers_have_the_grace_period_of_the_units():
    for name in ("core", "execution"):
        unit = (DEPLOY / "systemd" / f"aftertouch-{name}.service").read_text()
        seconds = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0]
        assert COMPOSE["services"][name]["stop_grace_period"] == f"{seconds}s"
        assert _pod(name)["terminationGracePeriodSeconds"] == int(seconds)


@each_row("file, manifest", MANIFESTS)
def test_manifest_has_members_and_volumes(file, manifest):
    assert {"apiVersion", "kind", "metadata"} <= set(manifest)
    assert manifest["metadata"]["namespace"] == "aftertouch"
    if manifest["kind"] not in ("Deployment", "Job"):
        return
    pod = manifest["spec"]["template"]["spec"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    if manifest["kind"] == "Deployment":
        assert manifest["spec"]["selector"]["matchLabels"] == manifest["spec"]["template"]["metadata"]["labels"]


def test_dockerfile_names_existing_files_and_settings():
    text = (DEPLOY / "Dockerfile").read_text()
    for source in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / each).exists() for each in source.split())
    names = set(re.findall(r"\b(AFTERTOUCH_\w+|DJANGO_\w+)=", text)) - {"DJANGO_SETTINGS_MODULE"}
    assert {name.lower() for name in names} <= set(Environment.model_fields)
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE))
    assert {each["build"]["target"] for each in COMPOSE["services"].values() if "build" in each} <= stages


def test_image_contains_all_program_files(tmp_path):
    text = (DEPLOY / "Dockerfile").read_text()
    for sources, target in re.findall(r"^COPY (.+) (\S+)$", text, re.MULTILINE):
        for source in sources.split():
            _copy(ROOT / source, tmp_path / target / ("" if (ROOT / source).is_dir() else Path(source).name))
    state = {"DJANGO_SETTINGS_MODULE": "config.settings.local", "AFTERTOUCH_STATE_DIR": str(tmp_path / "state")}
    done = subprocess.run(
        [sys.executable, "manage.py", "shell", "-c", LOOKS],
        cwd=tmp_path,
        env=state,
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT,
    )
    assert done.returncode == 0, done.stderr


LOOKS = """
from django.core.management import call_command
from scheduling import metrics
from scheduling.management.commands import bootstrap
call_command("check")
metrics.versions()
bootstrap.SHIPPED.read_bytes()
"""


def _copy(source, target):
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
