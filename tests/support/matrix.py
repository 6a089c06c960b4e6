"""Build a small configuration and record events."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:  # plug-ins are imported before the apps are ready
    from scheduling.models import Node, Template
    from scheduling.planning.ingest import Receipt


class MatrixBuilder:
    """One stage, one log channel, a cap of 3 a day, 72 hours of dedupe, and nodes on demand.

    Its own rows have no history, which takes five statements a row: their first edit lists no changes. Templates and
    nodes have theirs.
    """

    def __init__(self) -> None:
        from scheduling.models import ChannelConfig, HarassmentRule, Stage

        (self.stage,) = Stage.objects.bulk_create([Stage(key="presale")])
        (self.channel,) = ChannelConfig.objects.bulk_create([ChannelConfig(key="log", kind="log", idempotent=True)])
        HarassmentRule.objects.bulk_create(
            [
                HarassmentRule(kind="cap", limit=3, window=timedelta(hours=24)),
                HarassmentRule(kind="dedupe", window=timedelta(hours=72)),
                HarassmentRule(kind="conversation"),
            ]
        )

    def template(self, key: str, content_type: str = "", body: str = "hi {{ user.name }}", **changes: Any) -> Template:
        from scheduling.models import Template, TemplateText

        if template := Template.objects.filter(key=key).first():
            return template
        template = Template(key=key, content_type=content_type or key, **changes)
        with template.store_as_one_version():
            template.save()
            TemplateText.objects.create(template=template, body=body)
        return template

    def node(self, key: str = "guide", trigger: str = "material.downloaded", **changes: Any) -> Node:
        from scheduling.models import Node

        changes.setdefault("template", self.template(key))
        changes.setdefault("channel", self.channel)
        return Node.objects.create(key=key, stage=self.stage, trigger=trigger, **changes)


class RecordEvent(Protocol):
    """Record one event and return its receipt."""

    def __call__(self, type: str = "material.downloaded", user: str = "ann", **changes: Any) -> Receipt: ...


@pytest.fixture
def matrix(db, valkey) -> MatrixBuilder:
    """Start with an empty Valkey. A server of an earlier test may have noted a conversation after that test."""
    return MatrixBuilder()


@pytest.fixture
def record_event() -> RecordEvent:
    from scheduling.ids import new_id
    from scheduling.planning.ingest import NewEvent, record_events

    def record_event(type: str = "material.downloaded", user: str = "ann", **changes: Any) -> Receipt:
        event = NewEvent(
            source=changes.pop("source", "shop"),
            event_id=changes.pop("event_id", str(new_id())),
            type=type,
            user_id=user,
            **changes,
        )
        return record_events([event])[0]

    return record_event
