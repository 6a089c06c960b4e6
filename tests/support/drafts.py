"""Open and replay a draft as its pages and a worker do."""

from __future__ import annotations

from typing import Any

from scheduling.experiments import drafts
from scheduling.models import ConfigDraft


def open_draft(owner: Any, text: str) -> ConfigDraft:
    """Make this text the draft of a user."""
    draft = drafts.replace_text(owner, text, drafts.compute_seen(drafts.find_draft(owner)))
    assert draft is not None
    return draft


def replay_draft(draft: ConfigDraft) -> ConfigDraft:
    drafts.request_replay(draft.owner, drafts.compute_seen(draft))
    assert drafts.run_next_replay()
    draft.refresh_from_db()
    return draft
