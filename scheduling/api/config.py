"""Read the configuration as one document, and publish a document."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from functools import partial
from typing import Any

import structlog
from django.db import Error, OperationalError
from django.http import HttpRequest, HttpResponse
from django.utils.http import parse_header_parameters
from ninja import Field, Query, Router, Schema
from psycopg.errors import QueryCanceled

from scheduling.api.auth import ApiKeyAuth, build_api_key_actor, require_scope
from scheduling.api.schemas import Problem, ProblemOut, Reason
from scheduling.configuration.file import apply
from scheduling.configuration.file.section import Change, Stamp
from scheduling.db_timeouts import Deadline
from scheduling.errors import Conflict, FieldError, InvalidInput
from scheduling.models.encrypted import Unreadable
from scheduling.planning import rescheduling
from scheduling.planning.rescheduling import MoveCounts, list_rule_impacts
from scheduling.strict_text import MAX_SIZE, InvalidText, read_json, write_yaml

log = structlog.get_logger(__name__)

router = Router(tags=["configuration"])
READ_PROBLEMS = (401, 403, 406, 409, 429, 503)
PROBLEMS = (400, 401, 403, 408, 409, 412, 413, 415, 422, 428, 429, 503)
JSON, YAML = "application/json", "application/yaml"
#: Content types of a YAML body. The last two are older names of it.
YAML_TYPES = (YAML, "text/yaml", "application/x-yaml")
TIME_LIMIT = timedelta(seconds=20)  #: for counting the impact, and for moving touches
_DOCUMENT = {JSON: {"schema": {"type": "object"}}, YAML: {"schema": {"type": "string"}}}
_ETAG = {"ETag": {"description": "version of the stored configuration", "schema": {"type": "string"}}}
_IF_MATCH = {"name": "If-Match", "in": "header", "required": False, "schema": {"type": "string"}}
_PLACE = re.compile(r"\[(\d+)\]")


class Publication(Schema):
    """`reason` is required unless `dry_run`. `move_waiting` applies edited delays to waiting touches."""

    dry_run: bool = False
    move_waiting: bool = False
    reason: Reason = ""


class ChangedValueOut(Schema):
    path: str
    before: Any
    after: Any


class ChangeOut(Schema):
    """`verb`: `added`, `restored`, `changed` or `retired`. No secret is shown."""

    section: str
    verb: str
    label: str
    differences: list[ChangedValueOut]

    @staticmethod
    def resolve_section(change: Change) -> str:
        return change.section.name


class MovesOut(Schema):
    """`left`: touches that the time limit left; `broken`: PostgreSQL returned an error. The same request with
    `move_waiting` goes on, also with the version from before its publication."""

    touches: int
    overdue: int
    left: int
    broken: bool


class FailingOut(Schema):
    judged: int
    failing: int


class NodeImpactOut(Schema):
    """`moved`: what `move_waiting` would do; null if the delay stays. `condition`: waiting touches that would not meet
    the new condition now."""

    node: str
    verb: str
    waiting: int
    moved: MovesOut | None
    condition: FailingOut | None = Field(alias="failing")


class RuleImpactOut(Schema):
    """`counted`: `touches`, or `customers` for the hold-out."""

    rule: str
    verb: str
    waiting: int
    counted: str


class ImpactOut(Schema):
    nodes: list[NodeImpactOut]
    rules: list[RuleImpactOut]


class PublicationOut(Schema):
    """`impact` is for a `dry_run`; null if it takes too long to count. `moved` is for `move_waiting`."""

    stored: bool
    version: str
    changes: list[ChangeOut]
    notes: list[str]
    impact: ImpactOut | None
    moved: MovesOut | None


@router.get(
    "/config",
    auth=ApiKeyAuth("config.read"),
    response={READ_PROBLEMS: ProblemOut},
    openapi_extra={"responses": {200: {"description": "OK", "headers": _ETAG, "content": _DOCUMENT}}},
)
def get_config(request: HttpRequest) -> HttpResponse:
    """Return the configuration as `export_config` writes it, with its version as `ETag`.

    `Accept: application/yaml` asks for YAML. A secret is `(kept)`, which keeps the stored one when it is sent back.
    """
    notation = request.get_preferred_type([JSON, YAML, *YAML_TYPES[1:]])
    if notation is None:
        raise Problem(406, f"The configuration is {JSON} or {YAML}.")
    # An edit between the two reads makes the version too old, so that the client's publication is refused.
    version = apply.compute_version()
    try:
        found = apply.export_document()
    except Unreadable as error:
        raise Conflict(str(error)) from error
    text = json.dumps(found, ensure_ascii=False) if notation == JSON else write_yaml(found)
    headers = {"ETag": f'"{version}"', "Vary": "Accept"}
    return HttpResponse(text, content_type=f"{notation}; charset=utf-8", headers=headers)


@router.put(
    "/config",
    auth=ApiKeyAuth("config.write"),
    response={200: PublicationOut, PROBLEMS: ProblemOut},
    openapi_extra={"requestBody": {"required": True, "content": _DOCUMENT}, "parameters": [_IF_MATCH]},
)
def put_config(request: HttpRequest, response: HttpResponse, wish: Query[Publication]) -> dict[str, Any]:
    """Publish a configuration document of at most 1 MB, completely or not at all.

    A section of the document replaces the stored section; an absent section stays. `If-Match` names the version that
    the document was made from, or `*` for any. 412: another client published, or an operator edited, since.
    Changes of platforms and shops need the scope `rpa.configure` too, those of flows `rpa.commands`, those of webhooks
    `webhooks`.
    `dry_run` stores nothing and returns the changes and their impact; it needs neither `If-Match` nor `reason`.
    """
    given = _read_document(request)
    expected = _read_expected_version(request.headers.get("If-Match"), required=not wish.dry_run)
    impact: dict[str, Any] | None = None
    moved: MoveCounts | None = None
    try:
        if wish.dry_run:
            version = apply.compute_version()
            if expected not in (None, version):
                raise apply.OutdatedVersion
            planned = apply.plan_changes(given)
            _check_scopes(request, planned)
            impact = _measure_impact(planned)
        else:
            if not wish.reason.strip():
                raise InvalidInput.of("reason", "is required; dry_run needs none")
            stamp = Stamp(wish.reason, client=build_api_key_actor(request).name)
            planned, version = apply.publish_document(
                given, stamp, expected, partial(_check_scopes, request), may_repeat=wish.move_waiting
            )
            moved = _move_waiting(planned) if wish.move_waiting else None
    except apply.InvalidConfiguration as error:
        # A place is named as in all errors of the API: `nodes.2.template`.
        fields = [FieldError(_PLACE.sub(r".\1", each.field), each.message) for each in error.errors]
        raise InvalidInput(*fields) from error
    except apply.Busy as error:
        raise error.__cause__ or error from None
    except apply.OutdatedVersion as error:
        raise Problem(
            412, "The configuration changed after this version. Read it again; nothing was stored."
        ) from error
    response["ETag"] = f'"{version}"'
    return {
        "stored": not wish.dry_run, "version": version, "changes": planned.changes, "notes": planned.notes,
        "impact": impact, "moved": moved,
    }  # fmt: skip


def _read_document(request: HttpRequest) -> dict[str, Any]:
    """Parse the body.

    Raises:
        Problem: 400 if it is not a document; 415 for another content type.
    """
    media_type, parameters = parse_header_parameters(request.META.get("CONTENT_TYPE", ""))
    if parameters.get("charset", "utf-8").lower() not in ("utf-8", "utf8"):
        raise Problem(415, "The charset must be UTF-8.")
    try:
        if media_type in YAML_TYPES:
            return apply.parse_document(request.body)
        if media_type != JSON:
            raise Problem(415, f"Send {JSON} or {YAML}.")
        found = read_json(request.body.decode("utf-8-sig"), most=MAX_SIZE)
    except InvalidText as error:
        raise Problem(400, f"The document cannot be read: {error}.") from error
    except UnicodeDecodeError as error:
        raise Problem(400, "The document cannot be read: it must be UTF-8.") from error
    if not isinstance(found, dict):
        raise Problem(400, "The document cannot be read: it must be an object of sections.")
    return found


def _read_expected_version(given: str | None, *, required: bool) -> str | None:
    """Return the version of an `If-Match` header; None for any.

    Raises:
        Problem: 428 without the header; 412 if it names no version.
    """
    if given is None and required:
        raise Problem(428, "Send If-Match with the ETag of GET /api/v1/config, or * to overwrite any version.")
    text = (given or "*").strip()
    if text == "*":
        return None
    found = re.fullmatch(r'"([0-9a-f]{32})"', text)
    if found is None:
        raise Problem(412, "If-Match takes one ETag of GET /api/v1/config, with its quotes.")
    return found[1]


def _move_waiting(planned: apply.ChangePlan) -> MoveCounts:
    try:
        return rescheduling.move_after_plan(planned, TIME_LIMIT)
    except Error:  # the document is live in any case
        log.exception("reschedule_failed")
        return MoveCounts(broken=True)


def _check_scopes(request: HttpRequest, planned: apply.ChangePlan) -> None:
    """Refuse a change of a section that needs a further scope. Raises `Problem`, 403."""
    for scope in sorted({each.section.scope for each in planned.changes} - {""}):
        require_scope(request, scope)


def _measure_impact(planned: apply.ChangePlan) -> dict[str, Any] | None:
    """Return the impact; None if it takes longer than `TIME_LIMIT` in all."""
    deadline = Deadline(TIME_LIMIT.total_seconds())
    try:
        with deadline.limit_queries(TIME_LIMIT.total_seconds()):
            return {"nodes": rescheduling.list_impacts(planned, TIME_LIMIT), "rules": list_rule_impacts(planned)}
    except TimeoutError:
        return None
    except OperationalError as error:
        if deadline.is_over() or isinstance(error.__cause__, QueryCanceled):
            return None
        raise
