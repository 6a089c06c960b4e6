"""Every metric that anything of ours exports: its kind and its labels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import REGISTRY

import rpa_tasks.metrics
import scheduling.metrics
from scheduling.app_integrations import integrations
from scheduling.db_timeouts import Deadline
from scheduling.monitoring.complaint_stats import read_complaint_rates
from scheduling.planning import request_metrics

INSTRUMENTS = (scheduling.metrics, request_metrics, rpa_tasks.metrics)
OURS = ("aftertouch_", "celery_")
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


@dataclass(frozen=True)
class Exported:
    kind: str
    labels: tuple[str, ...]


def list_exported_metrics() -> dict[str, Exported]:
    """Return metrics by exported name; a histogram without its suffixes. Reads PostgreSQL, Redis and the broker."""
    while read_complaint_rates(Deadline(60.0)) is None:  # its gauges are missing until each hour is counted
        pass
    found = {}
    for module in INSTRUMENTS:
        for each in vars(module).values():
            if hasattr(each, "_labelnames") and hasattr(each, "_type"):
                found[_exposed_name(each._name, each._type)] = Exported(each._type, tuple(each._labelnames))
    for family in _families():
        found[_exposed_name(family.name, family.type)] = Exported(
            family.type, tuple(getattr(family, "_labelnames", ()))
        )
    registered = {
        _exposed_name(family.name, family.type) for family in REGISTRY.collect() if family.name.startswith(OURS)
    }
    assert registered <= set(found), "an instrument in a module that is not named here"
    return found


def list_series_names(metrics: dict[str, Exported]) -> set[str]:
    """Names as queries use them."""
    return {
        name if each.kind == "counter" else name + suffix
        for name, each in metrics.items()
        for suffix in SUFFIXES[each.kind]
    }


def _families() -> Iterable[Metric]:
    for read in [read for app in integrations() for read in app.metrics]:
        yield from read(Deadline(60.0))


def _exposed_name(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name
