"""The examples for KEDA and for the HPA fit their schemas and ask for numbers that exist.

The schemas are from PyPI: KEDA's of `cloudcoil.models.keda`, the HPA's of `kubernetes-validate`. Both refuse unknown
fields. KEDA's schema leaves the metadata of a trigger open, so its documented names are listed here.
"""

import json
from pathlib import Path

import jsonschema_rs
import pytest
import yaml

from config.environment import ROOT
from scheduling.api.receivers import ScalingOut
from scheduling.models import Scope
from tests.support.tables import each_row

KUBERNETES = ROOT / "deploy" / "kubernetes"
SCHEMAS = {
    "ScaledObject": "keda_scaled_object.json",
    "TriggerAuthentication": "keda_trigger_authentication.json",
    "HorizontalPodAutoscaler": "horizontal_pod_autoscaler.json",
}
#: https://keda.sh/docs/2.20/scalers/metrics-api
METRICS_API = {
    "url", "format", "valueLocation", "targetValue", "activationTargetValue", "unsafeSsl", "authMode", "method",
    "keyParamName", "aggregateFromKubeServiceEndpoints", "aggregationType",
}  # fmt: skip
TARGETS = {"core": "workers", "execution": "execution_nodes", "watcher": "watchers"}  #: kind by Deployment


def documents(name, kind=""):
    found = yaml.safe_load_all((KUBERNETES / name).read_text())
    return [each for each in found if kind in ("", each["kind"])]


def errors_of(manifest):
    schema = json.loads((Path(__file__).parent / "schemas" / SCHEMAS[manifest["kind"]]).read_text())
    return [
        f"{each.instance_path}: {each.message}" for each in jsonschema_rs.validator_for(schema).iter_errors(manifest)
    ]


KEDA, HPA = documents("keda.yaml"), documents("hpa.yaml")


@pytest.mark.parametrize(
    "manifest", [each for each in (*KEDA, *HPA) if each["kind"] != "Secret"], ids=lambda each: f"{each['kind']}"
)
def test_autoscaling_manifest_fits_its_schema(manifest):
    assert errors_of(manifest) == []


def test_keda_reads_the_wanted_numbers_with_a_bearer_token():
    (secret,) = documents("keda.yaml", "Secret")
    (authentication,) = documents("keda.yaml", "TriggerAuthentication")
    (reference,) = authentication["spec"]["secretTargetRef"]
    assert reference["parameter"] == "token"
    assert (reference["name"], [reference["key"]]) == (secret["metadata"]["name"], list(secret["stringData"]))
    assert f"--scope {Scope.METRICS}" in (KUBERNETES / "keda.yaml").read_text()
    objects = documents("keda.yaml", "ScaledObject")
    assert {each["spec"]["scaleTargetRef"]["name"] for each in objects} == set(TARGETS)
    for each in objects:
        (trigger,) = each["spec"]["triggers"]
        metadata, name = trigger["metadata"], each["spec"]["scaleTargetRef"]["name"]
        assert trigger["type"] == "metrics-api"
        assert set(metadata) <= METRICS_API
        assert (metadata["authMode"], metadata["targetValue"]) == ("bearer", "1")
        kind, _, field = metadata["valueLocation"].partition(".")
        assert (kind, field) == (TARGETS[name], "wanted")
        assert kind in ScalingOut.model_fields
        assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]


def test_hpa_reads_the_wanted_metrics():
    assert {each["spec"]["scaleTargetRef"]["name"] for each in HPA} == set(TARGETS)
    for each in HPA:
        (metric,) = each["spec"]["metrics"]
        assert (
            metric["external"]["metric"]["name"]
            == f"aftertouch_{TARGETS[each['spec']['scaleTargetRef']['name']]}_wanted"
        )
        assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}


@each_row("name", TARGETS)
def test_examples_scale_existing_deployments_and_smooth_the_numbers(name):
    deployed = {each["metadata"]["name"] for each in documents("aftertouch.yaml", "Deployment")}
    (keda,) = [each["spec"] for each in documents("keda.yaml", "ScaledObject") if each["metadata"]["name"] == name]
    (hpa,) = [each["spec"] for each in HPA if each["metadata"]["name"] == name]
    assert name in deployed
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (hpa["minReplicas"], hpa["maxReplicas"])
    behavior = keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == hpa["behavior"] == {"scaleDown": {"stabilizationWindowSeconds": 300}}
