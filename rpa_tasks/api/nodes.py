"""List, drain and resume execution nodes."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from ninja import Field, Path, Router, Schema

from rpa_tasks.api.jobs import OPERATE, PROBLEMS, READ
from rpa_tasks.jobs.ledger import NODE_SILENT
from rpa_tasks.jobs.nodes import count_free_slots, drain_node, measure_loads, resume_node
from rpa_tasks.models import ExecutionNode
from scheduling import sql
from scheduling.api.auth import build_api_key_actor
from scheduling.api.schemas import ProblemOut, Text, limit_list_time

router = Router(tags=["RPA"], auth=READ)


class NodeOut(Schema):
    """`empty`: a stop of the node ends no run and no take-over. `pinned` shops have their login only there."""

    name: str
    reports: bool
    seen_at: datetime
    started_at: datetime
    draining_at: datetime | None
    drained_by: str
    slots: int
    free_slots: int
    running: int = Field(alias="load.running")
    take_overs: int = Field(alias="load.take_overs")
    pinned: int = Field(alias="load.pinned")
    waiting: int = Field(alias="load.waiting")
    empty: bool = Field(alias="load.is_empty")
    queues: list[str] = Field(alias="serves")


class NodesOut(Schema):
    items: list[NodeOut]


@router.get("/rpa/nodes", response={200: NodesOut, PROBLEMS: ProblemOut})
def list_nodes(request: HttpRequest) -> dict[str, Any]:
    """List all execution nodes with their load. `pinned` counts the shops whose browser profile a node has, `waiting`
    those of them with a due job."""
    with limit_list_time():
        return {"items": _list_nodes(ExecutionNode.objects.all())}


@router.post("/rpa/nodes/{name}/drain", auth=OPERATE, response={200: NodeOut, PROBLEMS: ProblemOut})
def drain_execution_node(request: HttpRequest, name: Path[Text]) -> ExecutionNode:
    """Let the node start nothing new. Running jobs and take-overs continue. Idempotent."""
    with sql.brief_lock_waits():
        drain_node(name, by=build_api_key_actor(request).name)
    return _list_nodes(ExecutionNode.objects.filter(name=name))[0]


@router.post("/rpa/nodes/{name}/resume", auth=OPERATE, response={200: NodeOut, PROBLEMS: ProblemOut})
def resume_execution_node(request: HttpRequest, name: Path[Text]) -> ExecutionNode:
    """Let the node start jobs again. Idempotent."""
    with sql.brief_lock_waits():
        resume_node(name, by=build_api_key_actor(request).name)
    return _list_nodes(ExecutionNode.objects.filter(name=name))[0]


def _list_nodes(rows: QuerySet[ExecutionNode]) -> list[ExecutionNode]:
    reports = ExpressionWrapper(Q(seen_at__gt=Now() - NODE_SILENT), BooleanField())
    nodes: list[Any] = list(rows.annotate(reports=reports).order_by("name"))
    loads = measure_loads([node.name for node in nodes])
    for node in nodes:
        node.load = loads[node.name]
        node.free_slots = count_free_slots(node, node.load, reports=node.reports)
    return nodes
