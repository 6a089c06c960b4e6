"""List the requests of the HTTP API with the scope that each requires."""

from __future__ import annotations

from collections.abc import Iterator

from config.reference.tables import Table

ROOT = "/api/v1"


def api_tables() -> dict[str, Table]:
    import config.urls  # noqa: F401  (adds the routers of other apps)
    from scheduling.api.app import api

    return {"requests": Table(("request", "scope"), list(_operation_rows(api)))}


def _operation_rows(api: object) -> Iterator[list[str]]:
    for prefix, router in api._routers:  # type: ignore[attr-defined]
        for path, view in router.path_operations.items():
            for operation in filter(lambda each: each.include_in_schema, view.operations):
                authenticators = operation.auth_callbacks or [router.auth]
                scopes = " or ".join(f"`{scope}`" for each in authenticators for scope in each.scopes)
                for method in operation.methods:
                    yield [f"`{method} {ROOT}{prefix}{path.replace('{path:', '{')}`", scopes]
