"""Values of list filters that mean nothing: an action on all matching rows must not ignore the filter."""

from __future__ import annotations

from unittest import mock

from django.template.response import SimpleTemplateResponse
from django.test import Client

from tests.support.undrawn import read_context


def find_ignored_parameters(client: Client, address: str) -> list[str]:
    """Return the parameters of a list that select rows although their value means nothing. The list has rows."""
    listed = read_context(client, address)["cl"]
    assert listed.queryset.exists()
    names = {name for spec in listed.filter_specs for name in spec.expected_parameters()}
    # A filter that has nothing to offer is not among these.
    names |= {each.parameter_name for each in listed.list_filter if isinstance(each, type)}
    return [name for name in sorted({"q", *names} - {None}) if _selects_rows(client, address, name)]


def _selects_rows(client: Client, address: str, name: str) -> bool:
    given = {name: "no such value"}
    with mock.patch.object(SimpleTemplateResponse, "rendered_content", ""):
        answer = client.get(address, given)
    if answer.status_code != 200:
        assert answer.status_code in (302, 400)
        return False
    return bool(answer.context_data["cl"].queryset.exists())
