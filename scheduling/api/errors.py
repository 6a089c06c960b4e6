"""Turn every exception into a problem document (RFC 9457, `application/problem+json`) that names the wrong fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import structlog
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from ninja import NinjaAPI
from ninja.errors import AuthenticationError, HttpError, ValidationError

from scheduling import sql
from scheduling.errors import AftertouchError, Conflict, FieldError, InvalidInput, NotFound
from scheduling.strict_text import InvalidText

log = structlog.get_logger(__name__)

MEDIA_TYPE = "application/problem+json"
ERRORS_SHOWN = 100  #: more would make the response as large as the request
RETRY_AFTER = 2  #: seconds of `Retry-After` while the database is unavailable or the queue is full


class Problem(AftertouchError):
    """The request cannot be answered."""

    def __init__(
        self,
        status: int,
        detail: str,
        *errors: FieldError,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.errors: Sequence[FieldError] = errors
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, round(retry_after + 0.5)))

    def response(self) -> HttpResponse:
        return problem_response(self.status, str(self), self.errors, self.headers)


def problem_response(
    status: int, detail: str, errors: Sequence[FieldError] = (), headers: Mapping[str, str] | None = None
) -> HttpResponse:
    """Build a problem document with at most `ERRORS_SHOWN` field errors."""
    title = HTTPStatus(status).phrase
    body = {
        "type": f"urn:aftertouch:problem:{title.lower().replace(' ', '-')}",
        "title": title,
        "status": status,
        "detail": detail,
        "errors": [{"field": each.field, "message": each.message} for each in errors[:ERRORS_SHOWN]],
    }
    # ASCII, so that a lone surrogate in the request can be named in the response.
    return HttpResponse(json.dumps(body), content_type=MEDIA_TYPE, status=status, headers=dict(headers or {}))


def build_unavailable_problem(
    detail: str = "The database cannot be reached. Nothing is lost by sending it again.",
) -> Problem:
    """Return a 503 problem with `Retry-After`."""
    return Problem(503, detail, retry_after=RETRY_AFTER)


def register_problem_handlers(api: NinjaAPI) -> None:
    """Register the problem response for every exception of `api`."""
    api.add_exception_handler(Exception, _handle_exception)
    for known in (AftertouchError, ValidationError, AuthenticationError, HttpError, Http404):
        api.add_exception_handler(known, _handle_exception)


def _handle_exception(request: HttpRequest, error: Exception | type[Exception]) -> HttpResponse:
    problem = _convert_exception(error) if isinstance(error, Exception) else None
    if problem is None:
        log.exception("request_failed", path=request.path, exc_info=error)
        problem = Problem(500, "Something went wrong here. It has been logged.")
    return problem.response()


def _convert_exception(error: BaseException) -> Problem | None:  # noqa: C901, PLR0911 (a case for each exception)
    match error:
        case Problem():
            return error
        case InvalidInput():
            return Problem(422, "The input does not fit.", *error.errors)
        case NotFound():
            return Problem(404, str(error))
        case InvalidText():
            return Problem(400, f"The body is not JSON: {error}.")
        case Conflict():
            return Problem(409, str(error))
        case ValidationError():
            return _convert_validation_error(error)
        case AuthenticationError():
            return Problem(401, "An API key is required.", headers={"WWW-Authenticate": 'Bearer realm="aftertouch"'})
        case HttpError() if error.__cause__ is not None and (cause := _convert_exception(error.__cause__)):
            return cause  # ninja wraps what the parser raised
        case HttpError():
            return Problem(error.status_code, str(error))
        case Http404():
            return Problem(404, "There is no such thing.")
        case OperationalError() if sql.is_lock_timeout(error):
            log.warning("row_locked", error=str(error))
            return Problem(503, "Another transaction holds this row. Nothing is changed; send it again.", retry_after=0)
        case OperationalError() | InterfaceError():
            log.warning("database_unavailable", error=str(error))
            return build_unavailable_problem()
    return None


def _convert_validation_error(error: ValidationError) -> Problem:
    """Convert a validation error of ninja. Field names omit the view's argument, which clients do not know."""
    return Problem(422, "The input does not fit.", *(_convert_field_error(each) for each in error.errors))


def _convert_field_error(raw: Mapping[str, Any]) -> FieldError:
    location = [str(part) for part in raw.get("loc", ())]
    if location[:1] == ["body"]:
        # The argument's name is internal. For an array it names the content: `sessions.1.user_id`.
        location = location[1 if location[2:3] and location[2].isdigit() else 2 :]
    elif location[:1] in (["query"], ["path"], ["header"]):
        location = location[1:]
    return FieldError(".".join(location), str(raw.get("msg", "")))
